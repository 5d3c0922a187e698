"""FedMD: each client draws its scores on the public set to the mean of everybody's, then trains on its own data."""

import math

import torch

from coterie.core.rng import torch_rng
from reference import CODE, About, Case, Result, World, evaluated

ABOUT = About(CODE, ("no training on labels of the public set before the first round; all its items in every round",))


def reference(world: World, digest_epochs: float = 1) -> Result:
    public, consensus = world.public_part, None
    assert public is not None
    own = {i: world.module() for i in world.clients}
    for t in range(1, world.rounds + 1):
        sent = []
        for i in world.sampled(t):
            rng = torch_rng(0, "update", t, i, 0)
            opt = torch.optim.SGD(own[i].parameters(), lr=world.rate(t))
            for _ in range(
                math.ceil(digest_epochs * math.ceil(len(public) / world.batch)) if consensus is not None else 0
            ):
                drawn = torch.randperm(len(public), generator=rng)[: world.batch]
                opt.zero_grad()
                torch.nn.functional.l1_loss(own[i](public[drawn]), consensus[drawn]).backward()
                opt.step()
            world.fit(own[i], t, i)
            sent.append(evaluated(own[i], public))
        consensus = torch.stack(sent).mean(0)
    return Result(own, server={"scores": consensus})


CASES = [
    Case("fedmd", reference, run={"public": 7}),
    Case("fedmd", reference, {"digest_epochs": 3}, {"public": 5}, models=("mlp",), tag="more"),
]
