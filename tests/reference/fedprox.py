"""FedProx: FedAvg whose clients minimise loss + mu/2 |w - w_t|^2."""

from torch import Tensor, nn

from reference import BOTH, About, Case, Result, World, average, ce, copied, load

ABOUT = About(BOTH)


def reference(world: World, mu: float) -> Result:
    server = world.module()
    for t in range(1, world.rounds + 1):
        anchor = [p.detach().clone() for p in server.parameters()]

        def loss(model: nn.Module, x: Tensor, y: Tensor, anchor: list[Tensor] = anchor) -> Tensor:
            pull = sum((p - a).square().sum() for p, a in zip(model.parameters(), anchor, strict=True))
            return ce(model, x, y) + mu / 2 * pull

        ids = world.sampled(t)
        local = [world.fit(copied(server), t, i, loss) for i in ids]
        load(server, average(local, [world.sizes[i] for i in ids]))
    return Result(dict.fromkeys(world.clients, server), server)


CASES = [Case("fedprox", reference, {"mu": 0.3})]
