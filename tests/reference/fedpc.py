"""FedPC: clients grouped by prototypes; bodies and prototypes averaged in a group and mixed across groups."""

import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA
from torch import Tensor, nn

from coterie.core.rng import key
from reference import (
    PAPER,
    About,
    Case,
    Result,
    World,
    average,
    body,
    body_tree,
    copied,
    evaluated,
    head,
    load,
    two_means,
)

ABOUT = About(
    f"{PAPER} (`reading = text`), with a squared error as the pull (`reading = paper`); `fedpc-mended`: our change",
    ("a client that missed round 0 joins the nearest group; a group without participants keeps its body",),
)
Sets = dict[int, Tensor]  # prototypes by class


def reference(  # type: ignore[no-untyped-def]
    world: World, alpha: float, gamma: float, proto_loss: str, proto_reduce: str, init_protos: str, J: int = 2,
    inter: str = "adaptive", grouping: str = "prototypes", tau: float = 0.5, rehearsal: float = 0.0,
    **_,
) -> Result:  # fmt: skip
    start = world.module()
    own = {i: world.module() for i in world.clients}
    first = {i: _prototypes(world, start, i) for i in world.clients}
    of = _groups(world, first, J, grouping)
    bodies = [body_tree(start) for _ in range(J)]
    sets = [_mean_sets([first[i] for i in world.clients if of[i] == j]) for j in range(J)]
    bodies, sets, rho = _mixed(bodies, sets, inter)
    if init_protos == "none":
        sets = [{} for _ in sets]
    for t in range(1, world.rounds + 1):
        ids, found = world.sampled(t), {}
        for i in ids:
            C = sets[of[i]]

            def loss(model: nn.Module, x: Tensor, y: Tensor, C: Sets = C) -> Tensor:
                z = body(model)(x)
                ce = F.cross_entropy(head(model)(z), y)
                total = alpha * ce + gamma * _pull(z, y, C, proto_loss, proto_reduce, tau)
                if rehearsal and C:  # the classifier also names the received prototypes
                    total = total + rehearsal * F.cross_entropy(
                        head(model)(torch.stack([*C.values()])), torch.tensor([*C])
                    )
                return total

            world.fit(load(own[i], bodies[of[i]]), t, i, loss)
            found[i] = _prototypes(world, own[i], i)
        for j in range(J):
            if here := [i for i in ids if of[i] == j]:
                bodies[j] = average([body_tree(own[i]) for i in here])
                sets[j] = _mean_sets([found[i] for i in here])
        bodies, sets, rho = _mixed(bodies, sets, inter)
    clients = {i: load(copied(own[i]), bodies[of[i]]) for i in world.clients}
    return Result(clients, server={"groups": of, "rho": rho})


def _prototypes(world: World, model: nn.Module, i: int) -> Sets:
    x, y = world.train_part(i)
    z = evaluated(body(model), x).double()
    return {int(k): z[y == k].mean(0).float() for k in y.unique()}


def _groups(world: World, sets: dict[int, Sets], J: int, grouping: str) -> dict[int, int]:
    width = len(next(iter(sets[0].values())))
    rows = []
    for own in sets.values():
        rows.append(torch.stack([own.get(k, torch.zeros(width)) for k in range(world.classes)]))
    x = torch.stack(rows).flatten(1).double().numpy()
    points = PCA(n_components=0.95, svd_solver="full").fit_transform(x)
    labels = two_means(torch.from_numpy(points)) if J == 2 else [0] * len(rows)
    if grouping == "random":  # the same sizes, dealt out by a hash of what each client sent
        sizes = sorted((labels.count(j) for j in range(J)), reverse=True)
        order = sorted(range(len(rows)), key=lambda i: key(0, "random-groups", rows[i].numpy().tobytes().hex()))
        drawn = dict(zip(order, [j for j, n in enumerate(sizes) for _ in range(n)], strict=True))
        labels = [drawn[i] for i in range(len(rows))]
        seen = list(dict.fromkeys(labels))
        labels = [seen.index(j) for j in labels]
    return dict(zip(world.clients, labels, strict=True))


def _mean_sets(sets: list[Sets]) -> Sets:
    classes = {k for own in sets for k in own}
    return {k: torch.stack([own[k] for own in sets if k in own]).mean(0) for k in classes}


def _mixed(bodies: list[dict], sets: list[Sets], inter: str) -> tuple[list[dict], list[Sets], Tensor]:
    J = len(sets)
    rho = torch.full((J, J), 1 / J, dtype=torch.float64) if inter == "mean" else torch.eye(J, dtype=torch.float64)
    if inter == "adaptive":
        for j in range(J):
            for q in range(J):
                common = sorted(sets[j].keys() & sets[q].keys())
                if j != q and common:
                    a, b = (torch.cat([s[k] for k in common]).double() for s in (sets[j], sets[q]))
                    rho[j, q] = (a @ b / (a.norm() * b.norm())).clamp(0, 1)
        rho = rho / rho.sum(1, keepdim=True)
    new_bodies = [average(bodies, row.tolist()) for row in rho]
    new_sets = []
    for row in rho:
        out = {}
        for k in {k for own in sets for k in own}:
            have = [(float(w), own[k]) for w, own in zip(row, sets, strict=True) if k in own and w > 0]
            if have:
                out[k] = sum(w * v for w, v in have) / sum(w for w, _ in have)
        new_sets.append(out)
    return new_bodies, new_sets, rho


def _pull(z: Tensor, y: Tensor, C: Sets, kind: str, how: str, tau: float) -> Tensor:
    if kind == "batch_mean":
        pulls = [((z[y == k].mean(0) - C[int(k)]).square().sum() + 1e-12).sqrt() for k in y.unique() if int(k) in C]
    elif kind == "mse":
        pulls = [(v - C[int(k)]).square().mean() for v, k in zip(z, y, strict=True) if int(k) in C]
    else:
        classes = sorted(C)
        P = torch.stack([_unit(C[k]) for k in classes]) if C else torch.zeros(0, z.shape[1])
        pulls = []
        for v, k in zip(z, y, strict=True):
            if int(k) in C:
                pulls.append(-(P @ _unit(v) / tau).log_softmax(0)[classes.index(int(k))])
    if not pulls:
        return torch.zeros(())
    return torch.stack(pulls).sum() if how == "sum" else torch.stack(pulls).mean()


def _unit(v: Tensor) -> Tensor:
    return v / (v.square().sum() + 1e-6).sqrt()


def mended(world: World, **given) -> Result:  # type: ignore[no-untyped-def]
    """A contrast of cosines instead of the pull."""
    return reference(world, proto_loss="contrast", proto_reduce="mean", **given)


GROUPS = {"J": 2, "inter": "adaptive", "grouping": "prototypes", "pca": 0.95, "missing": "zero", "sim_map": "clip"}
TEXT = GROUPS | {
    "alpha": 0.5, "gamma": 0.5, "proto_loss": "batch_mean", "proto_reduce": "sum", "init_protos": "clustering"
}  # fmt: skip
SQUARED = {"proto_loss": "mse", "proto_reduce": "mean", "init_protos": "none"}
MENDED = GROUPS | {
    "alpha": 1.0, "gamma": 0.5, "tau": 0.5, "rehearsal": 0.5, "init_protos": "none"
}  # fmt: skip
CASES = [
    Case("fedpc-mended", mended, MENDED),
    Case("fedpc-mended-j1", mended, MENDED | {"J": 1}, long=("cnn",)),
    Case("fedpc-mended-no-proto", mended, MENDED | {"gamma": 0.0, "rehearsal": 0.0}, long=("cnn",)),
    Case("fedpc-mended-no-mixing", mended, MENDED | {"inter": "none"}, long=("cnn",)),
    Case("fedpc-mended-mean", mended, MENDED | {"inter": "mean"}, long=("cnn",)),
    Case("fedpc-mended-random", mended, MENDED | {"grouping": "random"}, long=("cnn",)),
    Case("fedpc", reference, TEXT | SQUARED),
    Case("fedpc-j1", reference, TEXT | SQUARED | {"J": 1}, long=("cnn",)),
    Case("fedpc-no-proto", reference, TEXT | SQUARED | {"gamma": 0.0}, long=("cnn",)),
    Case("fedpc-no-mixing", reference, TEXT | SQUARED | {"inter": "none"}, long=("cnn",)),
    Case("fedpc-mean", reference, TEXT | SQUARED | {"inter": "mean"}, long=("cnn",)),
    Case("fedpc-random", reference, TEXT | SQUARED | {"grouping": "random"}, long=("cnn",)),
    Case("fedpc", reference, TEXT | {"reading": "text"}, tag="text"),
]
