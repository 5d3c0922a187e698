"""Ditto: FedAvg, and beside it a model of the client's own that is pulled towards the received one."""

import torch
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, ce, copied, load, parameters, squares

ABOUT = About(
    CODE,
    ("participants are drawn alike, so that methods can be compared (`draw = samples`)",),
)


def reference(world: World, lam: float, draw: str = "uniform") -> Result:
    server, own = world.module(), {i: world.module() for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t) if draw == "uniform" else _by_samples(world, t)
        anchor = parameters(server)

        def pulled(model: nn.Module, x: Tensor, y: Tensor, anchor: list[Tensor] = anchor) -> Tensor:
            return ce(model, x, y) + lam / 2 * squares(model, anchor)

        local = [world.fit(copied(server), t, i) for i in ids]
        for i in ids:
            world.fit(own[i], t, i, pulled)
        load(server, average(local))
    return Result(own, server)


def _by_samples(world: World, t: int) -> list[int]:
    m = int(world.join * len(world.sizes) + 0.5)
    return sorted(torch.multinomial(torch.tensor(world.sizes).double(), m, generator=world.rng("sample", t)).tolist())


CASES = [
    Case("ditto", reference, {"lam": 0.5}, {"momentum": 0.9, "epochs": 2}),
    Case("ditto", reference, {"lam": 0.5, "draw": "samples"}, {"rounds": 4}, tag="authors", long=("cnn",)),
]
