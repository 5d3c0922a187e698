"""FedUV: cross-entropy, a hinge on the deviation of each class's probability, and a kernel over pairs of features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, body, copied, head, load

ABOUT = About(CODE, ("features are what enters the head", "a batch of one sample has no regulariser (undefined there)"))


def reference(world: World, lam: float = 2.5, mu: float = 0.5) -> Result:
    reach = torch.eye(world.classes).std(0).mean()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = body(model)(x)
        out = head(model)(z)
        if len(x) == 1:
            return F.cross_entropy(out, y)
        spread = F.relu(reach - out.softmax(1).std(0)).mean()
        far = F.pdist(z).square()
        close = torch.exp(-far / far[far != 0].median()).mean()
        return F.cross_entropy(out, y) + lam * spread + mu * close

    server = world.module()
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        load(server, average([world.fit(copied(server), t, i, loss) for i in ids], [world.sizes[i] for i in ids]))
    return Result(dict.fromkeys(world.clients, server), server)


CASES = [Case("feduv", reference), Case("feduv", reference, {"lam": 0.5, "mu": 2.0}, {"lr": 0.03}, tag="uniform")]
