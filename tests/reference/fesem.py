"""FeSEM: trained models go to the nearest of G centres, centres to the mean of what came to them."""

import torch

from reference import About, Case, Result, World, average, copied, load, two_means, vector

ABOUT = About(
    "paper's equations, FlexCFL's rule for participants",
    (
        "the authors re-cluster every few rounds on a few layers and skip clusters of one; here each round, all layers",
        "centres are means of the clients that answered in the round; a client without an answer gets a random centre",
    ),
)


def reference(world: World, groups: int) -> Result:
    assert groups == 2
    centres, of, grouped = [world.module() for _ in range(2)], {}, False

    def centre(i: int) -> int:
        if i in of or not grouped:
            return of.get(i, 0)
        return int(torch.randint(2, (), generator=world.rng("centre", i)))

    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        local = {i: world.fit(copied(centres[centre(i)]), t, i) for i in ids}
        if grouped:
            far = {i: [(vector(local[i]) - vector(c)).norm() for c in centres] for i in ids}
            of |= {i: int(far[i][1] < far[i][0]) for i in ids}
        else:
            of |= dict(zip(ids, two_means(torch.stack([vector(local[i]) for i in ids])), strict=True))
            grouped = True
        for g in {of[i] for i in ids}:
            centres[g] = load(copied(centres[g]), average([local[i] for i in ids if of[i] == g]))
    return Result({i: centres[centre(i)] for i in world.clients}, server={"centres": centres, "cluster": of})


CASES = [Case("fesem", reference, {"groups": 2}, {"rounds": 4})]
