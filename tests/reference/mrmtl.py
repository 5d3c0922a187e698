"""MR-MTL: every client keeps a model, pulled towards a mean that moves by the mean of the clients' changes."""

from torch import Tensor, nn

from reference import PAPER, About, Case, Result, World, average, ce, copied, load, parameters, squares, tensors

ABOUT = About(PAPER, ("clients that are not sampled keep their models",))


def reference(world: World, lam: float) -> Result:
    server, own = world.module(), {i: world.module() for i in world.clients}
    for t in range(1, world.rounds + 1):
        anchor = parameters(server)

        def pulled(model: nn.Module, x: Tensor, y: Tensor, anchor: list[Tensor] = anchor) -> Tensor:
            return ce(model, x, y) + lam / 2 * squares(model, anchor)

        changes = []
        for i in world.sampled(t):
            before = tensors(copied(own[i]))
            world.fit(own[i], t, i, pulled)
            changes.append({k: v - before[k] for k, v in tensors(own[i]).items()})
        mean = average(changes)
        load(server, {k: v + mean[k] for k, v in tensors(server).items()})
    return Result(own, server)


CASES = [Case("mr-mtl", reference, {"lam": 0.5}, {"momentum": 0.9, "epochs": 2}, long=("cnn",))]
