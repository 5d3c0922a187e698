"""MOON: cross-entropy over two cosines, received model against last local model, whose label is the first."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, body, copied, load

ABOUT = About(CODE, ("features are what enters the head; the authors' models have a projection before it",))


def reference(world: World, mu: float, tau: float = 0.5) -> Result:
    server = world.module()
    last = {i: world.module().eval() for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids, local = world.sampled(t), []
        for i in ids:
            received, old = copied(server).eval(), last[i]

            def loss(model: nn.Module, x: Tensor, y: Tensor, received: nn.Module = received, old: nn.Module = old):  # type: ignore[no-untyped-def]
                z = body(model)(x)
                with torch.no_grad():
                    near, far = body(received)(x), body(old)(x)
                cosines = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, far)], 1)
                first = torch.zeros(len(x), dtype=torch.long)
                return F.cross_entropy(model[-1](z), y) + mu * F.cross_entropy(cosines / tau, first)  # type: ignore[index]

            local.append(world.fit(copied(server), t, i, loss))
        load(server, average(local, [world.sizes[i] for i in ids]))
        last |= {i: copied(model).eval() for i, model in zip(ids, local, strict=True)}
    return Result(dict.fromkeys(world.clients, server), server)


CASES = [
    Case("moon", reference, {"mu": 5.0}, {"join": 0.7}),
    Case("moon", reference, {"mu": 1.0, "tau": 1.0}, {"epochs": 2}, tag="mild"),
]
