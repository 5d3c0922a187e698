"""FedProto: class means of features travel; features are pulled towards everybody's."""

import torch
from torch import Tensor, nn

from reference import BOTH, About, Case, Result, World, body, class_means, evaluated, features, head

ABOUT = About(
    BOTH,
    (
        "class means come from one pass after training, not from features while the model moves",
        "uniform mean over clients as in the authors' code (`weighting = samples`: the paper's, by counts)",
        "the head decides (`decide = nearest`)",
        "a class that no client sent in a round keeps its prototype",
    ),
)


def reference(world: World, lam: float, decide: str = "head", weighting: str = "uniform") -> Result:
    own, C = {i: world.module() for i in world.clients}, {}
    for t in range(1, world.rounds + 1):

        def loss(model: nn.Module, x: Tensor, y: Tensor, C: dict[int, Tensor] = dict(C)) -> Tensor:  # noqa: B006
            z = body(model)(x)
            pulls = [(z[k] - C[int(label)]).square().mean() for k, label in enumerate(y) if int(label) in C]
            pull = torch.stack(pulls).sum() / len(y) if pulls else 0.0
            return nn.functional.cross_entropy(head(model)(z), y) + lam * pull

        found: dict[int, list[tuple[Tensor, int]]] = {}
        for i in world.sampled(t):
            world.fit(own[i], t, i, loss)
            x, y = world.train_part(i)
            for k, mean in class_means(features(own[i], x), y).items():
                found.setdefault(k, []).append((mean, int((y == k).sum()) if weighting == "samples" else 1))
        for k, sent in found.items():
            C[k] = sum(m * n for m, n in sent) / sum(n for _, n in sent)
    prototypes = torch.stack([C[k] for k in range(world.classes)])
    logits = {}
    for i in world.clients:
        x, labels = world.test_part(i)[0], set(world.train_part(i)[1].tolist())
        if decide == "head":
            logits[i] = evaluated(own[i], x)
        else:
            far = torch.cdist(features(own[i], x), prototypes)
            logits[i] = torch.stack([-far[:, k] if k in labels else torch.full((len(x),), -1e9) for k in range(4)], 1)
    return Result(own, server={"prototypes": prototypes}, logits=logits)


CASES = [
    Case("fedproto", reference, {"lam": 1.0}),
    Case(
        "fedproto", reference, {"lam": 0.5, "decide": "nearest"}, {"weighting": "samples"}, tag="nearest", long=("cnn",)
    ),
]
