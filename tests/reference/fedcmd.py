"""FedCMD: batches vote for a linear layer; it turns personal, layers before it are averaged, those after it mixed."""

import torch
from torch import Tensor, nn

from reference import About, Case, Result, World, average, copied, load, tensors

ABOUT = About(
    "paper's equations; authors' code where the text is silent",
    (
        "candidates are all linear layers, a tie goes to the deepest; the authors' code names three layers",
        "sample weights belong to the participants, and the similarity matrix is whole; in the code neither is so",
        "means and deviations are compared (`use_sigma = False`: means only, as in the code)",
    ),
)


def reference(world: World, rho: float, use_sigma: bool = True, score: str = "own") -> Result:
    server, first = world.module(), max(1, int(rho * world.rounds + 0.5))
    layers = [k for k, m in server.named_modules() if isinstance(m, nn.Linear)]
    won = [0] * len(layers)
    own = {i: world.module() for i in world.clients}
    for t in range(1, first + 1):
        ids, ballots = world.sampled(t), []
        for i in ids:
            own[i] = copied(server)
            scores: list[Tensor] = []
            _fit_and_score(world, own[i], t, i, layers, scores, use_sigma)
            table = torch.stack(scores)
            votes = [_deepest_least(row) for row in table]
            most = max(votes.count(k) for k in range(len(layers)))
            tied = [k for k in range(len(layers)) if votes.count(k) == most]
            ballots.append(min(tied, key=lambda k: (float(table[:, k].mean()), -k)))
        counts = [ballots.count(k) for k in range(len(layers))]
        won[max(range(len(layers)), key=lambda k: (counts[k], k))] += 1
        load(server, average([own[i] for i in ids], [world.sizes[i] for i in ids]))
    layer = layers[max(range(len(layers)), key=lambda k: (won[k], k))]
    place = [int(k.split(".")[0]) for k in tensors(server)]
    before, after = (
        [k for k, p in zip(tensors(server), place, strict=True) if (p < int(layer) if side else p > int(layer))]
        for side in (True, False)
    )
    stored = {i: copied(server) for i in world.clients}
    apart: set[int] = set()
    step = {i: torch.zeros_like(tensors(server)[f"{layer}.weight"]) for i in world.clients}

    def received(i: int) -> dict[str, Tensor]:
        rows = torch.stack(list(step.values())).double()
        s = torch.stack([_rows_cosine(rows[i], other) for other in rows]).clamp(min=0)
        mixed = average(list(stored.values()), s.softmax(0).tolist())
        out = {k: tensors(server)[k] for k in before} | {k: mixed[k] for k in after}
        return out if i in apart else {**tensors(server), **out}

    for t in range(first + 1, world.rounds + 1):
        ids = world.sampled(t)
        sent = {i: received(i) for i in ids}
        for i in ids:
            world.fit(load(own[i], sent[i]), t, i)
        for i in ids:
            step[i] = tensors(own[i])[f"{layer}.weight"] - tensors(stored[i])[f"{layer}.weight"]
            stored[i] = copied(own[i])
        apart |= set(ids)
        mean = average([own[i] for i in ids], [world.sizes[i] for i in ids])
        load(server, {k: mean[k] for k in before})
    clients = {}
    for i in world.clients:
        clients[i] = own[i] if score == "own" and i in apart else load(copied(own[i]), received(i))
    return Result(clients, server={"layer": layer, "votes": won})


def _fit_and_score(
    world: World, model: nn.Module, t: int, i: int, layers: list[str], scores: list[Tensor], use_sigma: bool
) -> None:
    modules = dict(model.named_modules())

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        hooks = [modules[k].register_forward_pre_hook(lambda _, args: outputs.append(args[0])) for k in layers]
        logits = model(x)
        for hook in hooks:
            hook.remove()
        to = {}
        for name, end in (("y", y), ("x", x)):
            to[name] = torch.stack([_distance(o, end, use_sigma) for o in [*outputs, logits]])
        scores.append((to["y"].diff() - to["x"].diff()).abs())
        return nn.functional.cross_entropy(logits, y)

    world.fit(model, t, i, loss)


def _distance(a: Tensor, b: Tensor, use_sigma: bool) -> Tensor:
    """2-Wasserstein of the Gaussians fitted to both after scaling to [0, 1]."""
    (m1, s1), (m2, s2) = _fit(a), _fit(b)
    return ((m1 - m2) ** 2 + (s1 - s2) ** 2).sqrt() if use_sigma else (m1 - m2).abs()


def _fit(t: Tensor) -> tuple[Tensor, Tensor]:
    v = t.detach().double().flatten()
    v = (v - v.min()) / (v.max() - v.min()) if v.max() > v.min() else torch.zeros_like(v)
    return v.mean(), v.std(correction=0).clamp(min=1e-3)


def _deepest_least(row: Tensor) -> int:
    return max(k for k, v in enumerate(row) if v == row.min())


def _rows_cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.cosine_similarity(a, b, dim=1, eps=1e-16).mean()


CASES = [
    Case("fedcmd", reference, {"rho": 0.4}, {"rounds": 5, "join": 0.7}),
    # elects the first linear layer, so that there is one behind it to be mixed
    Case("fedcmd", reference, {"rho": 0.4}, {"rounds": 5, "batch": 8}, ("cnn",), "first layer"),
    Case(
        "fedcmd",
        reference,
        {"rho": 0.2, "use_sigma": False, "score": "mixed"},
        {"rounds": 5},
        tag="means",
        long=("cnn",),
    ),
]
