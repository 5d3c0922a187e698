"""FedCAC: critical entries are shared only among clients whose critical entries are in the same places."""

import torch
from torch import nn

from reference import CODE, About, Case, Result, World, average, copied, load, tensors

ABOUT = About(
    CODE,
    (
        "the global mean is by samples (`weighting = uniform`)",
        "partial participation: masks and models of absent clients are kept (the authors have all take part)",
    ),
)


def reference(world: World, tau: float, beta: float, weighting: str = "samples") -> Result:
    server, models, masks = world.module(), {}, {}
    custom: dict[int, dict] = {}

    def merged(i: int) -> nn.Module:
        model = copied(server)
        if i in custom:
            mine = tensors(model)
            load(model, {k: torch.where(masks[i][k], custom[i][k], mine[k]) for k in masks[i]})
        return model

    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        for i in ids:
            start = merged(i)
            models[i] = world.fit(copied(start), t, i)
            masks[i] = {}
            for (k, old), new in zip(start.named_parameters(), models[i].parameters(), strict=True):
                c = ((new.data - old.data) * new.data).abs().flatten()
                mask = torch.zeros(len(c), dtype=torch.bool)
                mask[c.topk(int(tau * len(c) + 1e-9)).indices] = True
                masks[i][k] = mask.reshape(new.shape)
        sizes = [world.sizes[i] for i in ids] if weighting == "samples" else None
        load(server, average([models[i] for i in ids], sizes))
        known = list(models)
        flat = {i: torch.cat([m.flatten() for m in masks[i].values()]).double() for i in known}
        near = {(i, j): 1 - (flat[i] - flat[j]).abs().sum() / (2 * flat[i].sum()) for i in known for j in known}
        others = torch.stack([near[i, j] for i in known for j in known if i != j])
        bar = others.mean() + t / beta * (others.max() - others.mean())
        for i in known:
            friends = [j for j in known if j == i or near[i, j] >= bar - 1e-9]
            custom[i] = average([models[j] for j in friends])
    return Result({i: merged(i) for i in world.clients}, server)


CASES = [
    Case("fedcac", reference, {"tau": 0.5, "beta": 100}, {"rounds": 4}),
    Case(
        "fedcac",
        reference,
        {"tau": 0.3, "beta": 4},
        {"rounds": 4, "weighting": "uniform"},
        tag="authors",
        long=("cnn",),
    ),
]
