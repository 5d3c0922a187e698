"""CFL: one model per cluster, split in two by the cosines of the members' updates."""

import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from reference import CODE, About, Case, Result, World, average, copied, load, tensors, vector

ABOUT = About(
    CODE,
    (
        "only members that answered vote on a split; an absent one follows the half its last update is closer to",
        "momentum starts at zero in each round (`opt_state = keep`)",
        "a second split names clients, not positions in a sub-matrix",
        "no gap criterion (paper)",
    ),
)


def reference(world: World, eps1: float, eps2: float, first_round: int, min_cluster: int) -> Result:
    models, of, last = [world.module()], dict.fromkeys(world.clients, 0), {}
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        local = {i: world.fit(copied(models[of[i]]), t, i) for i in ids}
        moved = {i: vector(local[i]) - vector(models[of[i]]) for i in ids}
        last |= moved
        before = list(models)
        for c, start in enumerate(before):
            here = [i for i in ids if of[i] == c]
            if not here:
                continue
            D = torch.stack([moved[i] for i in here])
            parts = [here]
            small, large = D.mean(0).norm() < eps1, D.norm(dim=1).max() > eps2
            if t > first_round and len(here) > min_cluster and small and large:
                labels = _halves(D)
                parts = [[i for i, k in zip(here, labels, strict=True) if k == n] for n in dict.fromkeys(labels)]
                models.append(copied(start))
                means = [torch.stack([_unit(moved[i]) for i in part]).mean(0) for part in parts]
                for i in [i for i in world.clients if of[i] == c and i in last and i not in here]:
                    closer = torch.stack([_unit(m) @ _unit(last[i]) for m in means]).argmax()
                    of[i] = [c, len(models) - 1][int(closer)]
                of |= dict.fromkeys(parts[1], len(models) - 1)
            for part, number in zip(parts, [c, len(models) - 1], strict=False):
                start_of = tensors(start)
                steps = average([{k: v - start_of[k] for k, v in tensors(local[i]).items()} for i in part])
                models[number] = load(copied(start), {k: start_of[k] + v for k, v in steps.items()})
    return Result({i: models[of[i]] for i in world.clients}, server={"cluster": of})


def _halves(D: Tensor) -> list[int]:
    """Complete linkage on one minus the cosine, cut into two."""
    U = torch.stack([_unit(d) for d in D]).double()
    far = (1 - U @ U.T).clamp(min=0).fill_diagonal_(0)
    return fcluster(linkage(squareform(far.numpy(), checks=False), "complete"), 2, "maxclust").tolist()


def _unit(v: Tensor) -> Tensor:
    return v / v.norm()


SPLIT = {"eps1": 100.0, "eps2": 0.0, "first_round": 1, "min_cluster": 2}
CASES = [
    Case("cfl", reference, SPLIT, {"rounds": 4, "join": 0.8}),
    # with these bounds batch-norm statistics would decide: their changes are larger than those of parameters
    Case("cfl", reference, SPLIT | {"eps1": 0.3}, {"rounds": 4, "join": 0.8, "lr": 0.02}, ("cnn",), "norms"),
]
