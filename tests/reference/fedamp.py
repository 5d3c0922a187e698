"""FedAMP: clients train towards a mixture of all models in which similar ones weigh more."""

import torch
from torch import Tensor, nn

from reference import PAPER, About, Case, Result, World, average, ce, copied, load, parameters, squares, vector

ABOUT = About(
    PAPER,
    (
        "no code of the authors was found; distances over parameters as in PFLlib, whose pull has no gradient",
        "training starts from the client's own model (the paper leaves it open)",
    ),
)


def reference(
    world: World, variant: str, alpha: float = 1.0, sigma: float = 1.0, lam: float = 1.0, self_weight: float = 0.1
) -> Result:
    models = {i: world.module() for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        V = torch.stack([vector(m) for m in models.values()]).double()
        mixed = {i: average(list(models.values()), _weights(V, i, variant, alpha, sigma, self_weight)) for i in ids}
        for i in ids:
            u = parameters(load(copied(models[i]), mixed[i]))

            def loss(model: nn.Module, x: Tensor, y: Tensor, u: list[Tensor] = u) -> Tensor:
                return ce(model, x, y) + lam / (2 * alpha) * squares(model, u)

            world.fit(models[i], t, i, loss)
    return Result(models)


def _weights(V: Tensor, i: int, variant: str, alpha: float, sigma: float, self_weight: float) -> list[float]:
    others = [j for j in range(len(V)) if j != i]
    if variant == "heuristic":
        near = torch.stack([sigma * torch.cosine_similarity(V[i], V[j], dim=0) for j in others]).exp()
        row = (1 - self_weight) * near / near.sum()
    else:
        row = torch.stack([alpha * torch.exp(-(V[i] - V[j]).square().sum() / sigma) / sigma for j in others])
    out = dict(zip(others, row.tolist(), strict=True))
    return [out.get(j, 1 - float(row.sum())) for j in range(len(V))]


CASES = [
    Case("fedamp", reference, {"variant": "heuristic", "sigma": 30.0}),
    Case("fedamp", reference, {"variant": "attention", "sigma": 30.0, "lam": 0.5}, tag="attention", long=("cnn",)),
]
