"""FedFomo: a client weighs models of others by what they do for its validation loss per distance."""

import torch
from sklearn.cluster import SpectralClustering
from torch import Tensor, nn

from coterie.core.rng import key
from reference import CODE, PAPER, About, Case, Result, World, average, ce, copied, load, tensors, vector

ABOUT = About(
    f"{PAPER} (`reading = paper`), {CODE} (`reading = code`)",
    (
        "`reading = paper` by default: 2-norm, only clients' models, of all that ever answered, own if no one helps",
        "the chance of a random model falls by rounds, not by epochs",
        "`reading = code`: only clients that have answered are clustered",
    ),
)


def reference(
    world: World, reading: str, models: int = 5, explore: float = 0.3, explore_decay: float = 0.05, averages: int = 0
) -> Result:
    code = reading == "code"
    own, old = ({i: world.module() for i in world.clients} for _ in range(2))
    bank, when = {}, {}  # uploaded models in the order of first upload; round of the last upload
    P = torch.zeros(len(world.clients), len(world.clients), dtype=torch.float64)
    means: list[nn.Module] = []
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        newest = max(when.values(), default=0)
        offered = [i for i in bank if not code or when[i] == newest]
        told = {}
        for i in ids:
            sent = _choice(world, t, i, list(bank), offered, P[i], models, max(0, explore - explore_decay * (t - 1)))
            candidates = [*(copied(bank[j]) for j in sent), *means, own[i]]
            raw = _affinities(world, i, candidates, old[i], code)
            start = copied(old[i] if code else own[i])
            if (raw > 0).any():
                load(start, average(candidates, raw.clamp(min=0).tolist()))
            share = raw / max(abs(float(raw.sum())), 1e-9) if code else raw
            told[i] = list(zip(sent, share.tolist(), strict=False))
            old[i] = copied(start)
            own[i] = world.fit(start, t, i)
        for i in ids:
            bank[i], when[i] = copied(own[i]), t
            for j, value in told[i]:
                P[i, j] += value
        if averages:
            means = _averages(world, list(bank), bank, when, P, averages)
    return Result(own)


def _choice(
    world: World, t: int, i: int, known: list[int], offered: list[int], P: Tensor, models: int, chance: float
) -> list[int]:
    """The best others by affinity, equal ones in random order; with some chance a random one instead."""
    rng = world.rng("candidates", t, i)
    shuffled = [known[k] for k in torch.randperm(len(known), generator=rng)]
    best = sorted(shuffled, key=lambda j: -float(P[j]) if i in known else 0.0)
    at_random = [known[k] for k in torch.randperm(len(known), generator=rng)]
    best, at_random = ([j for j in order if j in offered and j != i] for order in (best, at_random))
    picked: list[int] = []
    for draw in torch.rand(min(models, len(best)), generator=rng).tolist():
        order = at_random if draw < chance else best
        picked.append(next(j for j in order if j not in picked))
    return picked


def _affinities(world: World, i: int, candidates: list[nn.Module], old: nn.Module, code: bool) -> Tensor:
    x, y = world.val_part(i)
    out = []
    for model in candidates:
        with torch.no_grad():
            gain = ce(copied(old).eval(), x, y) - ce(copied(model).eval(), x, y)
        out.append(gain / ((vector(model) - vector(old)).norm(p=1 if code else 2) + 1e-5))
    return torch.stack(out)


def _averages(world: World, ids: list[int], bank: dict, when: dict, P: Tensor, groups: int) -> list[nn.Module]:
    labels = [0] * len(ids)
    if len(ids) > groups:
        near = torch.exp(-((1 - P[ids][:, ids]) ** 2) / 2)
        spectral = SpectralClustering(
            groups, affinity="precomputed", assign_labels="discretize", random_state=key(0, "fomo") % 2**32
        )
        labels = spectral.fit_predict(((near + near.T) / 2).numpy()).tolist()
    out = []
    for label in sorted(set(labels)):
        here = [i for i, k in zip(ids, labels, strict=True) if k == label]
        recent = [i for i in here if when[i] == max(when[j] for j in here)]
        out.append(load(world.module(), average([bank[i] for i in recent], [world.sizes[i] for i in recent])))
    return [*out, load(world.module(), average([tensors(m) for m in out]))]


CASES = [
    Case(
        "fedfomo",
        reference,
        {"reading": "paper", "models": 2, "explore": 0.5},
        {"rounds": 4, "join": 0.7},
        long=("cnn",),
    ),
    Case("fedfomo", reference, {"reading": "code", "models": 2, "averages": 2}, {"rounds": 4, "join": 0.7}, tag="code"),
]
