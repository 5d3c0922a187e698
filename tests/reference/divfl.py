"""DivFL: greedy facility location over the clients' last gradients chooses who takes part."""

import torch
from torch import nn

from reference import CODE, About, Case, Result, World, average, ce, copied, load

ABOUT = About(
    CODE,
    (
        "plain greedy selection; the authors' lazy and stochastic versions find the same set faster or nearly the same",
        "batch norm uses running statistics in the gradients",
    ),
)


def gradient(world: World, model: nn.Module, i: int) -> torch.Tensor:
    """The gradient over the whole training part, in evaluation mode."""
    used = copied(model).eval()
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(ce(used, *world.train_part(i)), list(used.parameters()))]
    )


def selected(rows: list[torch.Tensor], count: int) -> list[int]:
    """Add the client with the least sum of distances of all to their nearest, one by one."""
    far = [[float((a.double() - b.double()).norm()) for b in rows] for a in rows]
    chosen: list[int] = []
    while len(chosen) < count:
        rest = [k for k in range(len(rows)) if k not in chosen]
        chosen.append(min(rest, key=lambda k: sum(min(row[c] for c in [*chosen, k]) for row in far)))
    return chosen


def reference(world: World) -> Result:
    server = world.module()
    known = [gradient(world, server, i) for i in world.clients]
    for t in range(1, world.rounds + 1):
        ids = sorted(selected(known, max(1, int(world.join * len(known) + 0.5))))
        for i in ids:
            known[i] = gradient(world, server, i)
        local = [world.fit(copied(server), t, i) for i in ids]
        load(server, average(local, [world.sizes[i] for i in ids]))
    return Result(dict.fromkeys(world.clients, server), server, server={"gradients": dict(enumerate(known))})


CASES = [
    Case("divfl", reference, run={"rounds": 4}),
    Case("divfl", reference, run={"join": 0.34, "epochs": 2}, tag="two"),
]
