"""FedGroup: groups by the directions of a first training, then FedAvg in each."""

import torch
from torch import Tensor

from reference import CODE, About, Case, Result, World, average, ce, copied, load, two_means, vector

ABOUT = About(
    CODE,
    (
        "all clients pre-train in round 0; in the authors' code clients do so when they are first sampled",
        "a later newcomer trains E epochs, not the 50 steps of the cold start",
        "no FedGrouProx",
    ),
)


def reference(world: World, groups: int, pretrain_steps: int, founders: int = 20, eta_g: float = 0.0) -> Result:
    assert groups == 2
    start, local = world.module(), {}
    for i in world.clients:
        model = copied(start)
        opt = world.optimiser(model.parameters(), 1)
        for x, y in world.batches(0, i, steps=pretrain_steps):
            opt.zero_grad()
            ce(model, x, y).backward()
            opt.step()
        local[i] = model
    moved = {i: (vector(m) - vector(start)).double() for i, m in local.items()}
    order = torch.randperm(len(world.clients), generator=world.rng("founders")).tolist()
    first = sorted(order[: founders * groups])
    D = torch.stack([moved[i] for i in first])
    directions = torch.linalg.svd(D, full_matrices=False).Vh[:groups]
    labels = two_means(torch.stack([_cosine(d, v) for d in D for v in directions]).reshape(len(D), groups))
    of = dict(zip(first, labels, strict=True))
    models, means = [], []
    for g in (0, 1):
        here = [i for i in first if of[i] == g]
        models.append(load(copied(start), average([local[i] for i in here])))
        means.append(torch.stack([moved[i] for i in here]).mean(0))
    for i in world.clients:
        if i not in of:
            of[i] = int(_cosine(moved[i], means[1]) > _cosine(moved[i], means[0]))
    for t in range(1, world.rounds + 1):
        local = {i: world.fit(copied(models[of[i]]), t, i) for i in world.sampled(t)}
        for g in (0, 1):
            if here := [i for i in local if of[i] == g]:
                load(models[g], average([local[i] for i in here], [world.sizes[i] for i in here]))
        if eta_g:
            pull = [eta_g / float(vector(m).norm()) for m in models]
            mixed = [average(models, [1, pull[1]]), average(models, [pull[0], 1])]
            for model, tree in zip(models, mixed, strict=True):
                load(model, tree)
    whole = load(copied(start), average(models))
    return Result({i: models[of[i]] for i in world.clients}, whole, {"cluster": of})


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return a @ b / (a.norm() * b.norm())


CASES = [
    Case("fedgroup", reference, {"groups": 2, "pretrain_steps": 5}),
    Case(
        "fedgroup",
        reference,
        {"groups": 2, "pretrain_steps": 3, "founders": 2, "eta_g": 0.5},
        tag="founders",
        long=("cnn",),
    ),
]
