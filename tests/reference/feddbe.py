"""FedDBE: a bias of the client's own before the head, and a pull of each batch's mean feature to the mean of all."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, body, copied, head, load

ABOUT = About(
    CODE,
    (
        "means of round 0 are of a clean pass after training (of its last batches there)",
        "the mean of a batch stands alone (momentum 1, their choice for Fashion-MNIST)",
    ),
)


def mean_feature(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return body(copied(model).eval())(x).mean(0)


def reference(world: World, kappa: float) -> Result:
    server, sizes = world.module(), world.sizes
    first = {i: world.fit(world.module(), 0, i) for i in world.clients}
    means = [mean_feature(first[i], world.train_part(i)[0]) for i in world.clients]
    common = sum(n * m for n, m in zip(sizes, means, strict=True)) / sum(sizes)
    bias = {i: nn.Parameter(torch.zeros_like(common)) for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids, local = world.sampled(t), []
        for i in ids:
            model = copied(server)

            def loss(model: nn.Module, x: Tensor, y: Tensor, own: nn.Parameter = bias[i]) -> Tensor:
                z = body(model)(x)
                return F.cross_entropy(head(model)(z + own), y) + kappa * 0.5 * (z.mean(0) - common).pow(2).mean()

            local.append(world.fit(model, t, i, loss, [*model.parameters(), bias[i]]))
        load(server, average(local, [sizes[i] for i in ids]))
    logits = {}
    for i in world.clients:
        with torch.no_grad():
            logits[i] = head(server)(body(copied(server).eval())(world.test_part(i)[0]) + bias[i])
    states = {i: {"own": {"p:bias": bias[i].data}} for i in world.clients}
    return Result(whole=server, logits=logits, states=states, server={"mean": common})


CASES = [
    Case("feddbe", reference, {"kappa": 50.0}, {"lr": 0.02}),
    Case("feddbe", reference, {"kappa": 1.0}, {"epochs": 2}, models=("mlp",), tag="mild"),
]
