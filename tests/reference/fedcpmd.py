"""FedCPMD: clients vote for the layer they keep; clients with the same layer share the rest by how alike it is."""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from reference import PAPER, About, Case, Result, World, average, copied, evaluated, head_names, load, tensors
from reference.fedper import reference as fedper

ABOUT = About(
    f"{PAPER} (`fedcpmd`), our change (`fedcpmd-mended`), described behaviour of the published code (`fedcpmd-code`)",
    (
        "`fedcpmd-code`: clusters take turns in the same rounds, not one after another; the text's distances",
        "counters stay with the client, which sends the layer in the lead",
        "a client that never voted sends its layer when phase 2 begins, without training",
    ),
)
Tree = dict[str, Tensor]


def reference(  # type: ignore[no-untyped-def]
    world: World, preparation: int, distance: str = "w2", phase1_personal: str = "classifier",
    personal_part: str = "layer", shared_by: str = "cluster", min_participants: int = 1, phi_of: str = "flat",
    phi_input: str = "params", phi_weight: str = "linear", candidates: str = "fc", variant: str = "",
    relay: bool = False, score: str = "eq7", **_,
) -> Result:  # fmt: skip
    start = world.module()
    heads, names = head_names(start), list(tensors(start))
    linear = [k for k, m in start.named_modules() if isinstance(m, nn.Linear)]
    layers = linear if candidates == "fc" else linear[-1:]
    kinds = ("js", "w2", "hellinger", "bhattacharyya") if distance in ("auto", "best") else (distance,)
    models = {i: world.module() for i in world.clients}
    w: Tree = {k: v.clone() for k, v in tensors(start).items() if k not in heads or phase1_personal == "none"}
    votes = {i: torch.zeros(len(kinds), len(layers)) for i in world.clients}
    sums = {i: torch.zeros(len(kinds), len(layers), dtype=torch.float64) for i in world.clients}
    voted: set[int] = set()
    errors: dict[int, Tensor] = {}  # on validation data, by layer

    def own(m: int) -> list[str]:
        extra = heads if personal_part == "layer_and_classifier" else []
        return [] if variant == "only-cluster" else [k for k in names if k.startswith(f"{layers[m]}.") or k in extra]

    # ---- phase 1 -----------------------------------------------------------------------------------------------------
    n = len(world.clients)
    queue = torch.randperm(n, generator=world.rng("coverage")).tolist()
    for t in range(1, preparation + 1):
        order = [i for i in queue if i not in voted] + torch.randperm(n, generator=world.rng("sample", t)).tolist()
        ids = sorted(list(dict.fromkeys(order))[: 1 if relay else int(world.join * n + 0.5)])
        for i in ids:
            begun = load(copied(models[i]), w)
            models[i] = world.fit(load(models[i], w), t, i)
            if variant == "oracle":
                s = _errors(world, i, begun, models[i], [own(m) for m in range(len(layers))])[None]
            else:
                s = torch.stack([_scores(world, i, models[i], layers, kind, score) for kind in kinds])
            for d in range(len(kinds)):
                votes[i][d, max(m for m in range(len(layers)) if s[d, m] == s[d].min())] += 1
            sums[i] += s
            if distance == "best":
                errors[i] = _errors(world, i, begun, models[i], [own(m) for m in range(len(layers))])
        voted |= set(ids)
        shared = list(w) if t < preparation or personal_part != "layer" else names  # at the switch the classifier too
        mean = average([models[i] for i in ids], [world.sizes[i] for i in ids])
        w |= {k: mean[k] for k in shared}
    assert voted == set(world.clients)

    # ---- the switch --------------------------------------------------------------------------------------------------
    choice = {i: [_leads(votes[i][d], sums[i][d], variant) for d in range(len(kinds))] for i in world.clients}
    agreed = [sum(choice[i][d] == choice[i][e] for i in choice for e in range(len(kinds))) for d in range(len(kinds))]
    deciding = agreed.index(max(agreed))
    if distance == "best":
        wrong = [sum(world.sizes[i] * float(errors[i][choice[i][d]]) for i in choice) for d in range(len(kinds))]
        deciding = wrong.index(min(wrong))
    layer = {i: choice[i][deciding] for i in world.clients}
    if variant == "random":
        order = sorted(layer, key=lambda i: (world.sizes[i], i))
        dealt = sorted(layer.values())
        drawn = torch.randperm(n, generator=world.rng("deal")).tolist()
        layer = dict(sorted(zip(order, [dealt[k] for k in drawn], strict=True)))
    apart = shared_by == "cluster" and variant != "only-decoupling"
    pools = (
        [[i for i in world.clients if layer[i] == m] for m in range(len(layers))] if apart else [list(world.clients)]
    )
    trained: set[int] = set()
    phi: dict[int, Tensor] = {}
    sent: dict[int, dict[int, Tree]] = {}  # bodies of the last participants, by pool
    rows: dict[int, dict[int, float]] = {}  # of a client over the last participants of its pool

    def received(i: int) -> Tree:
        out = {k: v for k, v in w.items() if k not in own(layer[i]) or i not in trained}
        pool = next(p for p, members in enumerate(pools) if i in members)
        if variant == "only-decoupling" or pool not in sent:
            return out
        for k in [k for k in names if k not in own(layer[i])]:
            have = {j: tree[k] for j, tree in sent[pool].items() if k in tree}
            share = rows.get(i) if apart or i in rows else None
            if apart and share is None:
                share = {j: float(world.sizes[j]) for j in sent[pool]}
            if have and share is not None and sum(share[j] for j in have) > 0:
                out[k] = average([{k: v} for v in have.values()], [share[j] for j in have])[k]
        return out

    # ---- phase 2 -----------------------------------------------------------------------------------------------------
    for t in range(preparation + 1, world.rounds + 1):
        rng, picked = world.rng("sample", t), []
        for members in [p for p in pools if p]:
            m = 1 if relay else max(min_participants, int(world.join * len(members) + 0.5))
            order = torch.randperm(len(members), generator=rng).tolist()
            picked.append([members[k] for k in order[:m]])
        begin = {i: received(i) for ids in picked for i in ids}
        for i in sorted(begin):
            models[i] = world.fit(load(models[i], begin[i]), t, i)
            compared = f"{layers[layer[i]]}." if shared_by == "cluster" else heads[0].removesuffix("weight")
            phi[i] = _rows_of(models[i], compared) - (_rows_of(start, compared) if phi_input == "delta" else 0)
        trained |= set(begin)
        parts = [p for p, members in enumerate(pools) if members]
        for p, ids in zip(parts, picked, strict=True):
            sent[p] = {
                j: {k: v.clone() for k, v in tensors(models[j]).items() if k not in own(layer[j])} for j in sorted(ids)
            }
            for i in [i for i in pools[p] if i in phi and not variant.startswith("only")]:
                rows[i] = _weights(i, phi, sorted(ids), phi_of, phi_weight, world)
        if not apart:
            for k in names:
                have = {j: tree[k] for j, tree in sent[0].items() if k in tree}
                if have:
                    w[k] = average([{k: v} for v in have.values()], [world.sizes[j] for j in have])[k]
    clients = {i: load(copied(models[i]), received(i)) for i in world.clients}
    return Result(clients, server={"layer": layer})


def _weights(i: int, phi: dict[int, Tensor], ids: list[int], of: str, weight: str, world: World) -> dict[int, float]:
    s = []
    for j in ids:
        a, b = phi[i].double(), phi[j].double()
        cos = (
            (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)) if of == "rows" else (a * b).sum() / (a.norm() * b.norm())
        )
        s.append(cos.mean().clamp(0, 1))
    row = torch.stack(s)
    row = -(1 - row.clamp(max=0.9999)).log() if weight == "log" else row
    if row.sum() > 0:
        return dict(zip(ids, row.tolist(), strict=True))
    return {j: float(j == i) if i in ids else float(world.sizes[j]) for j in ids}


def _rows_of(model: nn.Module, layer: str) -> Tensor:
    return torch.cat([tensors(model)[f"{layer}weight"], tensors(model)[f"{layer}bias"][:, None]], 1)


def _leads(votes: Tensor, sums: Tensor, variant: str) -> int:
    tied = [m for m in range(len(votes)) if variant == "oracle" or votes[m] == votes.max()]
    least = min(float(sums[m]) for m in tied)
    return max(m for m in tied if float(sums[m]) == least)


def _errors(world: World, i: int, begun: nn.Module, trained: nn.Module, parts: list[list[str]]) -> Tensor:
    x, y = world.val_part(i)
    out = []
    for part in parts:
        tried = load(copied(begun), {k: tensors(trained)[k] for k in part})
        out.append(1 - int((evaluated(tried, x).argmax(1) == y).sum()) / len(y))
    return torch.tensor(out, dtype=torch.float64)


def _scores(world: World, i: int, model: nn.Module, layers: list[str], kind: str, score: str) -> Tensor:
    """|change of the distance to the labels - change of that to the inputs| from each candidate to the next.

    eq6_reversed: distance of the difference of outputs to the difference of inputs and labels.
    """
    x, y = world.train_part(i)
    assert isinstance(model, nn.Sequential)
    outputs = [evaluated(model[: int(k)], x) for k in layers] + [evaluated(model, x)]
    labels = _moments(y.double() / (world.classes - 1))
    if score == "eq6_reversed":
        wanted = _difference(_fit(x), labels)
        steps = [_difference(_fit(b), _fit(a)) for a, b in pairwise(outputs)]
        return torch.tensor([_distance(step, wanted, kind) for step in steps], dtype=torch.float64)
    to_y, to_x = (torch.tensor([_distance(_fit(o), end, kind) for o in outputs], dtype=torch.float64)
                  for end in (labels, _fit(x)))  # fmt: skip
    return (to_y.diff() - to_x.diff()).abs()


def _difference(p: tuple[float, float], q: tuple[float, float]) -> tuple[float, float]:
    return p[0] - q[0], math.sqrt(p[1] ** 2 + q[1] ** 2)


def _fit(t: Tensor) -> tuple[float, float]:
    v = t.double().flatten()
    return _moments((v - v.min()) / (v.max() - v.min()))


def _moments(v: Tensor) -> tuple[float, float]:
    return float(v.mean()), max(float(v.std(correction=0)), 1e-3)


def _distance(p: tuple[float, float], q: tuple[float, float], kind: str) -> float:
    (m1, s1), (m2, s2) = p, q
    if kind == "w2":
        return math.hypot(m1 - m2, s1 - s2)
    if kind == "js":
        grid = np.unique(np.concatenate([m + s * np.linspace(-10, 10, 4001) for m, s in (p, q)]))
        a, b = (np.exp(-(((grid - m) / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi)) for m, s in (p, q))
        mixed = (a + b) / 2
        each = [np.where(f > 0, f * np.log(np.maximum(f, 1e-300) / np.maximum(mixed, 1e-300)), 0) for f in (a, b)]
        return float(np.trapezoid((each[0] + each[1]) / 2, grid))
    both = s1**2 + s2**2
    coefficient = math.sqrt(2 * s1 * s2 / both) * math.exp(-((m1 - m2) ** 2) / (4 * both))
    return math.sqrt(1 - coefficient) if kind == "hellinger" else -math.log(coefficient)


def variant_of(name: str):  # type: ignore[no-untyped-def]
    def run(world: World, **settings) -> Result:  # type: ignore[no-untyped-def]
        return reference(world, variant=name, **settings)

    return run


def full(world: World, layer: str = "") -> Result:
    """Everybody keeps the same layer from the first round on."""
    if not layer:
        return fedper(world)
    own, w = {i: world.module() for i in world.clients}, tensors(world.module())
    w = {k: v for k, v in w.items() if not k.startswith(f"{layer}.")}
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        for i in ids:
            world.fit(load(own[i], w), t, i)
        mean = average([own[i] for i in ids], [world.sizes[i] for i in ids])
        w = {k: mean[k] for k in w}
    return Result({i: load(own[i], w) for i in world.clients})


def assigned(world: World, assignment: list[str]) -> Result:
    """Each client keeps the layer it is given and trains with the clients that keep the same one."""
    own, bodies = {i: world.module() for i in world.clients}, dict[str, Tree]()
    layers = [name for name, _ in world.module().named_modules() if name in assignment]
    members = {k: [i for i in world.clients if assignment[i] == k] for k in layers}
    for k in layers:
        bodies[k] = {n: v for n, v in tensors(world.module()).items() if not n.startswith(f"{k}.")}
    for t in range(1, world.rounds + 1):
        rng = world.rng("sample", t)
        for k, ids in members.items():
            order = torch.randperm(len(ids), generator=rng).tolist()
            picked = sorted(ids[p] for p in order[: max(1, int(world.join * len(ids) + 0.5))])
            for i in picked:
                world.fit(load(own[i], bodies[k]), t, i)
            mean = average([own[i] for i in picked], [world.sizes[i] for i in picked])
            bodies[k] = {n: mean[n] for n in bodies[k]}
    return Result({i: load(own[i], bodies[assignment[i]]) for i in world.clients})


RUN = {"rounds": 5, "lr": 0.01}  # at this rate votes differ, so that there are two clusters


def mended(world: World, **given) -> Result:  # type: ignore[no-untyped-def]
    """Without cluster servers: layers are mixed over all that share them, by the changes of the classifiers."""
    return reference(world, **MEND, **given)


def mended_of(name: str):  # type: ignore[no-untyped-def]
    def run(world: World, **given) -> Result:  # type: ignore[no-untyped-def]
        return mended(world, variant=name, **given)

    return run


def relay(world: World, **given) -> Result:  # type: ignore[no-untyped-def]
    """One participant per round and cluster: nothing is averaged."""
    fixed = {"relay": True, "phase1_personal": "none", "switch_init": "global", "similarity_payload": "none"}
    return reference(world, **fixed, **given)


VOTES = {"preparation": 2, "distance": "w2", "candidates": "fc"}
TEXT = VOTES | {
    "phase1_personal": "classifier", "personal_part": "layer", "switch_init": "global", "min_participants": 1,
    "phi_of": "flat", "phi_input": "params", "phi_weight": "linear", "unsampled_body": "similarity",
    "similarity_payload": "full",
}  # fmt: skip
MEND = {
    "phase1_personal": "none", "shared_by": "all", "switch_init": "global", "phi_of": "rows", "phi_input": "delta",
    "phi_weight": "log",
}  # fmt: skip
OURS = VOTES | {"personal_part": "layer_and_classifier", "similarity_payload": "full"}
CODE = VOTES | {"vote": "round", "tie": "mean_score", "preparation": 6, "score": "eq6_reversed"}
CASES = [
    Case("fedcpmd-mended", mended, OURS, RUN),
    Case("fedcpmd-mended-auto", mended, OURS | {"distance": "auto"}, RUN, long=("cnn",)),
    Case("fedcpmd-mended-classifier", mended, OURS | {"candidates": "classifier"}, RUN, long=("cnn",)),
    Case("fedcpmd-mended-random", mended_of("random"), OURS, RUN, long=("cnn",)),
    Case("fedcpmd-mended-oracle", mended_of("oracle"), OURS, RUN, long=("cnn",)),
    Case("fedcpmd", reference, TEXT | {"distance": "js"}, RUN),
    Case("fedcpmd", reference, TEXT, RUN, tag="w2", long=("cnn",)),
    Case("fedcpmd-auto", reference, TEXT | {"distance": "auto"}, RUN, long=("cnn",)),
    Case("fedcpmd-classifier", reference, TEXT | {"candidates": "classifier"}, RUN, long=("cnn",)),
    Case("fedcpmd-random", variant_of("random"), TEXT, RUN, long=("cnn",)),
    Case("fedcpmd-oracle", variant_of("oracle"), TEXT, RUN, long=("cnn",)),
    Case("fedcpmd-code", relay, CODE, RUN | {"rounds": 10}, long=("cnn",)),
    Case(
        "fedcpmd-only-cluster",
        variant_of("only-cluster"),
        TEXT | {"phase1_personal": "none", "similarity_payload": "none"},
        RUN,
        long=("cnn",),
    ),
    Case(
        "fedcpmd-only-decoupling",
        variant_of("only-decoupling"),
        TEXT | {"similarity_payload": "none"},
        RUN,
        long=("cnn",),
    ),
    Case("fedcpmd", reference, TEXT | {"distance": "best"}, RUN, tag="best", long=("cnn",)),
    Case("fedcpmd-assigned", assigned, {"assignment": ["1", "3", "1", "1", "3", "3"]}, models=("mlp",)),
    Case("fedcpmd-assigned", assigned, {"assignment": ["8", "10", "0", "8", "10", "10"]}, models=("cnn",), tag="cnn"),
    Case("fedcpmd-full", full, long=("cnn",)),
    Case("fedcpmd-full", full, {"layer": "1"}, models=("mlp",), tag="first layer"),
]
