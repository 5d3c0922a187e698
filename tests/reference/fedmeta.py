"""FedMeta: the gradient of the query loss through one step on the support set (MAML), rates learned too (Meta-SGD)."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from reference import PAPER, About, Case, Result, World, average, ce, copied, load, tensors

ABOUT = About(
    PAPER,
    (
        "no code of the authors was found; two public implementations were read",
        "support samples are evenly spaced in the client's data, not random",
        "five outer steps per round (`meta_steps = 1`), by plain SGD (Adam there)",
        "batch-norm statistics move in the query pass only",
    ),
)


def sets(n: int, share: float) -> tuple[list[int], list[int]]:
    """Positions of the support and the query samples."""
    support = [i for i in range(n) if int((i + 1) * share + 0.5) > int(i * share + 0.5)] or [0]
    return support, [i for i in range(n) if i not in support]


def reference(
    world: World,
    alpha: float,
    support: float,
    meta_steps: int,
    learner: str = "maml",
    beta: float | None = None,
    adapt_steps: int = 1,
) -> Result:
    server = world.module()
    rates = {k: torch.full_like(p, alpha) for k, p in server.named_parameters()}
    for t in range(1, world.rounds + 1):
        local, learned = [], []
        for i in world.sampled(t):
            model, own = copied(server), {k: v.clone() for k, v in rates.items()}
            x, y = world.train_part(i)
            first, second = sets(len(y), support)
            for _ in range(meta_steps):
                for v in own.values():
                    v.requires_grad_()
                weights = dict(model.named_parameters())
                scratch = copied(model)  # its statistics may move
                stats = {k: v.clone() for k, v in scratch.named_buffers()}
                value = nn.functional.cross_entropy(
                    functional_call(scratch, {**weights, **stats}, (x[first],)), y[first]
                )
                slopes = torch.autograd.grad(value, list(weights.values()), create_graph=True)
                moved = {k: weights[k] - own[k] * g for k, g in zip(weights, slopes, strict=True)}
                buffers = dict(model.named_buffers())
                value = nn.functional.cross_entropy(
                    functional_call(model, {**moved, **buffers}, (x[second],)), y[second]
                )
                both = [*weights.values(), *own.values()]
                total = torch.autograd.grad(value, both)
                rate = world.rate(t) if beta is None else beta
                with torch.no_grad():
                    for p, g in zip(both, total, strict=True):
                        p -= rate * g
                own = {k: v.detach() for k, v in own.items()}
            local.append(model)
            learned.append(own)
        load(server, average(local))
        rates = average(learned) if learner == "meta-sgd" else rates
    adapted = {}
    for i in world.clients:
        adapted[i] = copied(server)
        for batch in world.batches(world.rounds + 1, i, steps=adapt_steps):
            slope = grads(adapted[i], batch)
            with torch.no_grad():
                for (k, p), g in zip(adapted[i].named_parameters(), slope, strict=True):
                    p -= rates[k] * g
    whole = tensors(server)
    kept = {f"rate:{k}": v for k, v in rates.items()} if learner == "meta-sgd" else {}
    return Result(dict.fromkeys(world.clients, server), server, server={"w": {**whole, **kept}}, adapted=adapted)


def grads(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradient in training mode; the model's statistics stay."""
    used = copied(model)
    return list(torch.autograd.grad(ce(used, *batch), list(used.parameters())))


CASES = [
    Case("fedmeta", reference, {"alpha": 0.05, "support": 0.4, "meta_steps": 1, "adapt_steps": 2}, {"lr": 0.3}),
    Case("fedmeta", reference, {"learner": "meta-sgd", "alpha": 0.1, "support": 0.4, "meta_steps": 3}, tag="meta-sgd"),
]
