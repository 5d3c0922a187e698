"""kNN-Per: FedAvg, and at the client a mixture with the labels of the nearest stored samples."""

import torch

from reference import CODE, About, Case, Result, World, body, copied, head
from reference.fedavg import reference as fedavg

ABOUT = About(CODE, ("the share of the neighbours is chosen on validation data, as in the paper (a grid there)",))


def probabilities(model, world: World, client: int, x, share: float, k: int, scale: float):  # type: ignore[no-untyped-def]
    train, labels = world.train_part(client)
    with torch.no_grad():
        keys, z = body(model)(train), body(model)(x)
        out = []
        for row, own in zip(z, head(model)(z).softmax(1), strict=True):
            squares = (keys - row).square().sum(1)
            near = squares.argsort()[:k]
            close = torch.exp(-squares[near].double() / (len(row) * scale))
            votes = torch.stack([close[labels[near] == c].sum() for c in range(world.classes)]) / close.sum()
            out.append(share * votes.float() + (1 - share) * own)
    return torch.stack(out)


def reference(world: World, k: int = 10, scale: float = 1.0, share: float | None = None) -> Result:
    model = copied(fedavg(world).whole).eval()
    logits = {}
    for i in world.clients:
        best = share
        if best is None:
            x, y = world.val_part(i)
            tried = [j / 10 for j in range(11)]
            hits = [int((probabilities(model, world, i, x, s, k, scale).argmax(1) == y).sum()) for s in tried]
            best = tried[hits.index(max(hits))]
        logits[i] = probabilities(model, world, i, world.test_part(i)[0], best, k, scale).clamp(min=1e-12).log()
    return Result(whole=model, logits=logits)


CASES = [
    Case("knn-per", reference, {"k": 3, "share": 0.5}),
    Case("knn-per", reference, {"k": 5, "scale": 0.1}, models=("mlp",), tag="chosen share"),
]
