"""FedBE: an ensemble of the mean, drawn models and clients' models teaches the mean on the public set."""

import torch
from torch import nn

from reference import CODE, About, Case, Result, World, average, copied, evaluated, load, tensors

ABOUT = About(
    CODE,
    (
        "batch-norm statistics of drawn models are those of the mean",
        "the student's rate is constant, as in the code (cyclical in the paper)",
        "SWA starts after a share of the steps (after 500 there, a third of them)",
    ),
)


def gaussian(world: World, start: nn.Module, local: list[nn.Module], spread: float, rng: torch.Generator) -> dict:  # type: ignore[type-arg]
    """Noise around the mean direction of the updates, tensor by tensor, times their mean length."""
    out = {}
    for k, w in start.named_parameters():
        moves = [tensors(m)[k] - w.data for m in local]
        ways = [v / v.norm().clamp(min=1e-38) for v in moves]
        mean = sum(ways) / len(ways)  # type: ignore[arg-type]
        variance = (sum(v**2 for v in ways) / len(ways) - mean**2).clamp(min=1e-5)  # type: ignore[arg-type, union-attr]
        drawn = mean + spread * variance.sqrt() * torch.randn(w.numel(), generator=rng).view(w.shape)
        out[k] = w.data + drawn * sum(v.norm() for v in moves) / len(moves)  # type: ignore[arg-type]
    return out


def reference(
    world: World,
    models: int,
    server_epochs: int,
    server_lr: float,
    draw: str = "gaussian",
    spread: float = 0.1,
    concentration: float = 1.0,
    sharpness: float = 0.5,
    server_batch: int = 128,
    swa_start: float = 0.33,
    swa_every: int = 25,
) -> Result:
    server, public = world.module(), world.public_part
    assert public is not None
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        local = [world.fit(copied(server), t, i) for i in ids]
        mean = load(world.module(), average(local, [world.sizes[i] for i in ids]))
        rng, teachers = world.rng("teachers", t), [mean, *local]
        for _ in range(models):
            if draw == "gaussian":
                new = gaussian(world, server, local, spread, rng)
            else:
                share = torch._standard_gamma(torch.full((len(ids),), concentration), generator=rng)
                new = {k: v for k, v in average(local, share.tolist()).items() if k in dict(mean.named_parameters())}
            teachers.append(load(copied(mean), new))
        p = torch.stack([evaluated(m, public).softmax(1) for m in teachers]).mean(0)
        p = torch.maximum(p ** (1 / sharpness), torch.tensor(1e-8))
        p = p / p.sum(1, keepdim=True)
        student, steps, kept = copied(mean), 0, []
        total = server_epochs * -(-len(public) // server_batch)
        opt = torch.optim.SGD(student.parameters(), server_lr, momentum=0.9, weight_decay=1e-5)
        for epoch in range(server_epochs):
            order = torch.randperm(len(public), generator=world.rng("server", t, epoch))
            for part in order.split(server_batch):
                q = student(public[part]).softmax(1)
                opt.zero_grad()
                (p[part] * (p[part].log() - q.log())).mean().backward()
                opt.step()
                steps += 1
                if steps > swa_start * total and steps % swa_every == 0:
                    kept.append({k: v.detach().clone() for k, v in student.named_parameters()})
        server = load(student, average(kept)) if kept else student
    return Result(dict.fromkeys(world.clients, server), server)


SERVER = {"server_epochs": 4, "server_lr": 0.1, "server_batch": 5}
CASES = [
    Case("fedbe", reference, {"models": 3, **SERVER}, {"public": 8}),
    Case(
        "fedbe",
        reference,
        {"models": 2, "draw": "dirichlet", **SERVER},
        {"public": 8},
        models=("mlp",),
        tag="dirichlet",
    ),
    Case("fedbe", reference, {"models": 1, "swa_start": 0.25, "swa_every": 2, **SERVER}, {"public": 8}, tag="swa"),
]
