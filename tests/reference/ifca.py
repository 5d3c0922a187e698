"""IFCA: everybody trains the one of G models that has the lowest loss on its training data."""

import torch

from reference import CODE, About, Case, Result, World, average, ce, copied, load

ABOUT = About(CODE, ("model averaging only; no weight sharing",))


def reference(world: World, groups: int) -> Result:
    models = [world.start(g) for g in range(groups)]

    def pick(i: int) -> int:
        with torch.no_grad():
            return int(torch.stack([ce(copied(m).eval(), *world.train_part(i)) for m in models]).argmin())

    for t in range(1, world.rounds + 1):
        picked = {i: pick(i) for i in world.sampled(t)}
        local = {i: world.fit(copied(models[g]), t, i) for i, g in picked.items()}
        for g in set(picked.values()):
            load(models[g], average([local[i] for i in local if picked[i] == g]))
    return Result({i: models[pick(i)] for i in world.clients}, server={"models": models})


CASES = [Case("ifca", reference, {"groups": 3}, {"join": 0.7})]
