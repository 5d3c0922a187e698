"""FL+HC: after rounds of FedAvg everybody trains once, the updates are clustered, and each cluster goes on alone."""

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage

from reference import PAPER, About, Case, Result, World, average, copied, load, vector

ABOUT = About(
    PAPER,
    (
        "metric, linkage and threshold of the paper are unconfirmed: l2, ward, a quantile of the heights",
        "a client that missed the clustering round joins the nearest cluster when it answers",
    ),
)


def reference(world: World, warmup: int, groups: int | None = None, quantile: float = 0.9) -> Result:
    server, of, models = world.module(), {}, []
    for t in range(1, world.rounds + 1):
        if t <= warmup:
            ids = world.sampled(t)
        elif t == warmup + 1:
            ids = list(world.clients)
        else:
            rng, ids = world.rng("sample", t), []
            for c in range(len(models)):
                here = [i for i in world.clients if of[i] == c]
                m = max(1, int(world.join * len(here) + 0.5))
                ids += [here[k] for k in torch.randperm(len(here), generator=rng)[:m]]
        local = {i: world.fit(copied(models[of[i]] if models else server), t, i) for i in sorted(ids)}
        if t <= warmup:
            load(server, average(list(local.values()), [world.sizes[i] for i in local]))
            continue
        if t == warmup + 1:
            moved = torch.stack([vector(m) - vector(server) for m in local.values()]).double().numpy()
            tree = linkage(moved, "ward")
            if groups is not None:
                found = fcluster(tree, groups, "maxclust")
            else:
                found = fcluster(tree, np.nextafter(np.quantile(tree[:, 2], quantile), -np.inf), "distance")
            numbers = {label: k for k, label in enumerate(dict.fromkeys(found.tolist()))}
            of = dict(zip(local, [numbers[label] for label in found.tolist()], strict=True))
            models = [copied(server) for _ in numbers]
        for c, model in enumerate(models):
            if here := [i for i in local if of[i] == c]:
                load(model, average([local[i] for i in here], [world.sizes[i] for i in here]))
    return Result({i: models[of[i]] for i in world.clients}, server={"cluster": of, "models": models})


CASES = [
    Case("fl-hc", reference, {"warmup": 1, "groups": 2}),
    Case("fl-hc", reference, {"warmup": 1, "quantile": 0.5}, models=("mlp",), tag="quantile"),
]
