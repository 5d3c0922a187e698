"""FedRoD: a generic head with a balanced loss, and a personal one on top of it that teaches nobody else."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import (
    PAPER,
    About,
    Case,
    Result,
    World,
    average,
    body,
    copied,
    features,
    head,
    head_names,
    linear,
    load,
    tensors,
)

ABOUT = About(
    PAPER,
    (
        "the authors' code is empty; FL-bench and PFLlib differ from the paper",
        "the personal head starts as a copy of the generic one; classes a client lacks count as 1e-12 samples",
        "hidden width of the hyper-network is ours",
    ),
)


class Maker(nn.Module):
    """From label shares to a flat head: its bias, then its weight."""

    def __init__(self, classes: int, width: int, start: nn.Linear, rng: torch.Generator):
        super().__init__()
        size = sum(p.numel() for p in start.parameters())
        self.first, self.second = linear(rng, classes, width), linear(rng, width, size)
        self.second.bias.data = torch.cat([start.bias.data, start.weight.data.flatten()])

    def forward(self, shares: Tensor, z: Tensor) -> Tensor:
        flat, classes = self.second(F.relu(self.first(shares))), len(shares)
        return F.linear(z, flat[classes:].reshape(classes, -1), flat[:classes])


def reference(world: World, gamma: float = 1.0, hyper: bool = False, hyper_width: int = 16) -> Result:
    server = world.module()
    own = {i: copied(head(server)) for i in world.clients}
    maker = Maker(world.classes, hyper_width, head(server), world.rng("hyper"))
    counts = {i: torch.bincount(world.train_part(i)[1], minlength=world.classes).float() for i in world.clients}
    shares = {i: counts[i] / counts[i].sum() for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids, models, makers = world.sampled(t), [], []
        for i in ids:
            model, made = copied(server), copied(maker)
            second = made if hyper else own[i]
            opts = [world.optimiser(m.parameters(), t) for m in (model, second)]
            for x, y in world.batches(t, i):
                z = body(model)(x)
                g = head(model)(z)
                p = made(shares[i], z.detach()) if hyper else own[i](z.detach())
                prior = gamma * counts[i].clamp(min=1e-12).log()
                for opt, loss in zip(
                    opts, (F.cross_entropy(g + prior, y), F.cross_entropy(g.detach() + p, y)), strict=True
                ):
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
            models.append(model)
            makers.append(made)
        sizes = [world.sizes[i] for i in ids]
        load(server, average(models, sizes))
        load(maker, average(makers, sizes))
    last, clients, logits = head_names(server)[0].removesuffix("weight"), {}, {}
    for i in world.clients:
        z = features(server, world.test_part(i)[0])
        with torch.no_grad():
            logits[i] = head(server)(z) + (maker(shares[i], z) if hyper else own[i](z))
        extra = {f"p:{last}{k}": v for k, v in tensors(own[i]).items()}
        if hyper:
            extra = {k.replace("first", "h:1").replace("second", "h:2"): v for k, v in tensors(maker).items()}
        clients[i] = {**tensors(server), **extra}
    return Result(clients, None if hyper else server, logits=logits)


CASES = [
    Case("fedrod", reference, {"gamma": 0.8}, {"momentum": 0.5}),
    Case("fedrod", reference, {"hyper": True, "hyper_width": 5}, tag="hyper", long=("cnn",)),
]
