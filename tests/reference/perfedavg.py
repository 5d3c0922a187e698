"""Per-FedAvg: the gradient of the loss after one inner step, first-order or with a Hessian by differences."""

import torch
from torch import Tensor, nn

from reference import PAPER, About, Case, Result, World, average, ce, copied, load

ABOUT = About(
    PAPER,
    (
        "no code of the authors was found",
        "batch-norm statistics move in the outer pass only",
        "where an epoch ends inside a step, the missing batches come from its beginning",
    ),
)


def slope(model: nn.Module, batch: tuple[Tensor, Tensor], moved: bool = False) -> list[Tensor]:
    """Gradient in training mode; batch-norm statistics stay unless `moved`."""
    used = model if moved else copied(model)
    return list(torch.autograd.grad(ce(used, *batch), list(used.parameters())))


def shifted(model: nn.Module, by: list[Tensor], scale: float) -> nn.Module:
    out = copied(model)
    for p, d in zip(out.parameters(), by, strict=True):
        p.data = p.data + scale * d
    return out


def reference(world: World, alpha: float, variant: str = "fo", delta: float = 1e-3, adapt_steps: int = 1) -> Result:
    server, count = world.module(), 2 if variant == "fo" else 3
    for t in range(1, world.rounds + 1):
        ids, local = world.sampled(t), []
        for i in ids:
            w = copied(server)
            for epoch in world.epochs_of(t, i):
                for k in range(0, len(epoch), count):
                    step = [epoch[(k + j) % len(epoch)] for j in range(count)]
                    ahead = shifted(w, slope(w, step[0]), -alpha)
                    g = slope(ahead, step[1], moved=True)
                    if variant == "hf":
                        both = [slope(shifted(w, g, sign * delta), step[2]) for sign in (1, -1)]
                        h = [(a - b) / (2 * delta) for a, b in zip(*both, strict=True)]
                        g = [a - alpha * b for a, b in zip(g, h, strict=True)]
                    new = shifted(w, g, -world.rate(t))
                    for a, b in zip(new.buffers(), ahead.buffers(), strict=True):
                        a.copy_(b)
                    w = new
            local.append(w)
        load(server, average(local))
    adapted = {}
    for i in world.clients:
        adapted[i] = copied(server)
        for batch in world.batches(world.rounds + 1, i, steps=adapt_steps):
            adapted[i] = shifted(adapted[i], slope(adapted[i], batch), -alpha)
    return Result(dict.fromkeys(world.clients, server), server, adapted=adapted)


CASES = [
    Case("per-fedavg", reference, {"alpha": 0.05, "adapt_steps": 2}, {"epochs": 2}),
    # differences of float32 gradients amplify rounding by 1 / delta, so it is larger here than by default
    Case("per-fedavg-hf", reference, {"alpha": 0.05, "variant": "hf", "delta": 0.05}, {"epochs": 2}),
]
