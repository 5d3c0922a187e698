"""ECS-FL: edges average the devices whose models ended nearest to the one handed out."""

import math

import torch
from torch import Tensor, nn

from reference import PAPER, About, Case, Result, World, average, copied, load, vector

ABOUT = About(
    f"{PAPER} (`ecs-fl-mended`: our change)",
    (
        "where the paper contradicts itself: the mean over the nearest (10) in `ecs-fl`, weights 1/d over all (6) in "
        "`ecs-fl-invdist-all`; no device stops before it has trained (8)",
    ),
)


def reference(  # type: ignore[no-untyped-def]
    world: World, aggregation: str, select: str, train_fraction: float | None, epsilon: float, distance_norm: str,
    n_edges: int, select_fraction: float = 0.1, projection: int = 256, select_least: int = 1,
    **_,
) -> Result:  # fmt: skip
    share_of = world.join if train_fraction is None else train_fraction
    server, last, chosen = world.module(), {}, [0] * len(world.clients)
    n = len(world.clients)
    for t in range(1, world.rounds + 1):
        order = torch.randperm(n, generator=world.rng("sample", t)).tolist()
        ids = sorted(order[: max(1, int(share_of * n + 0.5))])
        local = {}
        for i in ids:
            if i not in last or (vector(last[i]) - vector(server)).norm() >= epsilon:
                local[i] = last[i] = world.fit(copied(server), t, i)
        means, weights = [], []
        for e in range(n_edges):
            devices = list(world.clients)[e::n_edges]
            here = [i for i in devices if i in local]
            d = {i: _distance(world, i, local[i], server, distance_norm) for i in here}
            training = max(1, int(share_of * len(devices) + 0.5))
            count = max(1, math.ceil(select_fraction * training - 1e-9), min(select_least, training))
            moved = {i: _projected(world, local[i], server, projection) for i in here}
            taken = here if aggregation == "invdist_all" else _chosen(world, t, e, here, d, count, select, moved)
            if not taken:
                continue
            share = [1.0 if aggregation == "mean" else 1 / d[i] for i in taken]
            means.append(average([local[i] for i in taken], share))
            weights.append(sum(share))
            for i in taken:
                chosen[i] += 1
        if means:
            load(server, average(means, weights))
    clients = dict.fromkeys(world.clients, server)
    return Result(clients, server, {"selected": chosen})


def _distance(world: World, i: int, model: nn.Module, start: nn.Module, norm: str) -> float:
    if norm == "per_param_layer":
        parts = zip(model.parameters(), start.parameters(), strict=True)
        return float(sum((a.data - b.data).double().square().mean() for a, b in parts)) ** 0.5
    d = float((vector(model).double() - vector(start).double()).norm())
    return d / math.ceil(world.epochs * math.ceil(world.sizes[i] / world.batch)) if norm == "per_step" else d


def _chosen(
    world: World, t: int, e: int, here: list[int], d: dict[int, float], count: int, rule: str, moved: dict[int, Tensor]
) -> list[int]:
    if rule == "random":  # of the devices in order of their size
        order = sorted(here, key=lambda i: (world.sizes[i], i))
        drawn = torch.randperm(len(order), generator=world.rng("select", t, e)).tolist()[:count]
        return sorted(order[k] for k in drawn)
    if rule == "herding":  # one by one, each time the one whose mean with the others is nearest to the mean of all
        target, taken = torch.stack([moved[i] for i in here]).mean(0) if here else torch.zeros(()), []
        while len(taken) < min(count, len(here)):
            rest = [i for i in here if i not in taken]
            gaps = [(torch.stack([moved[j] for j in [*taken, i]]).mean(0) - target).norm() for i in rest]
            taken.append(rest[int(torch.stack(gaps).argmin())])
        return sorted(taken)
    sign = -1 if rule == "farthest" else 1
    return sorted(sorted(here, key=lambda i: (sign * d[i], i))[:count])


def _projected(world: World, model: nn.Module, start: nn.Module, dims: int) -> Tensor:
    """Entries of the update, in alphabetical order of their names, added with random signs to `dims` sums."""
    old = dict(start.named_parameters())
    parts = sorted(model.named_parameters())
    update = torch.cat([(p.data - old[k].data).flatten() for k, p in parts]).double()
    rng = world.rng("projection")
    to = torch.randint(dims, update.shape, generator=rng)
    sign = torch.randint(2, update.shape, generator=rng) * 2 - 1
    return torch.zeros(dims, dtype=torch.float64).index_add(0, to, update * sign).float()


def mended(world: World, **given) -> Result:  # type: ignore[no-untyped-def]
    """The devices whose mean is nearest to the mean of all."""
    return reference(world, **{"aggregation": "mean", "select": "herding", "distance_norm": "none", **given})


def mended_by(rule: str):  # type: ignore[no-untyped-def]
    def run(world: World, **given) -> Result:  # type: ignore[no-untyped-def]
        return mended(world, select=rule, **given)

    return run


DEVICES = {"select_fraction": 0.5, "train_fraction": 1.0, "epsilon": 0.0, "n_edges": 2}
TEXT = DEVICES | {"aggregation": "mean", "select": "nearest", "distance_norm": "none", "two_stage": False}
ALL = {k: v for k, v in TEXT.items() if k != "select_fraction"} | {"aggregation": "invdist_all"}
WEIGHTED = {"distance_norm": "per_step", "train_fraction": 0.7, "epsilon": 0.3}
MENDED = DEVICES | {"select_fraction": 0.1, "select_least": 2}
CASES = [
    Case("ecs-fl-mended", mended, MENDED | {"projection": 256}),
    Case("ecs-fl-mended-random", mended_by("random"), MENDED, long=("cnn",)),
    Case("ecs-fl-mended-farthest", mended_by("farthest"), MENDED, long=("cnn",)),
    Case("ecs-fl-mended-mean-all", mended, MENDED | {"select_fraction": 1.0}, long=("cnn",)),
    Case("ecs-fl", reference, ALL | WEIGHTED, tag="weighted", long=("cnn",)),
    Case("ecs-fl-random", reference, TEXT | {"select": "random"}, long=("cnn",)),
    Case("ecs-fl-farthest", reference, TEXT | {"select": "farthest"}, long=("cnn",)),
    Case("ecs-fl-mean-all", reference, TEXT | {"select_fraction": 1.0}, long=("cnn",)),
    Case("ecs-fl", reference, TEXT),
    Case("ecs-fl", reference, TEXT | {"train_fraction": None}, tag="join", long=("cnn",)),
    Case(
        "ecs-fl",
        reference,
        TEXT | {"two_stage": True, "distance_norm": "per_param_layer"},
        tag="two stages",
        long=("cnn",),
    ),
    Case("ecs-fl-invdist", reference, TEXT | {"aggregation": "invdist"}, long=("cnn",)),
    Case("ecs-fl-invdist-all", reference, ALL, long=("cnn",)),
]
