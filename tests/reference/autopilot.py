"""Autopilot: FedAvg, a model of the client's own beside it, and a choice among candidates on validation data."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import About, Case, Result, World, average, copied, evaluated, features, head, load, tensors

ABOUT = About("its own description", ("there is no paper: the reference follows the text of the method",))
SINGLES = ("global", "tuned", "halfway", "head", "long-head", "own")
MEANS = {
    "neighbours": ("global", "near"),
    "head+neighbours": ("head", "near"),
    "head+tuned": ("head", "tuned"),
    "tuned+own": ("tuned", "own"),
    "tuned+global": ("tuned", "global"),
    "ensemble": ("global", "head", "tuned", "near"),
}
NAMES = (*SINGLES, *MEANS)


class Client:
    def __init__(self, world: World):
        self.own, self.tuned = world.module(), world.module()
        self.turns = self.waits = 0
        self.lowest = math.inf
        self.warm: dict[str, float] = {}
        self.scores, self.choice, self.scored = torch.zeros(len(NAMES)), NAMES[0], False


def reference(
    world: World,
    own_every: int = 6,
    patience: int = 2,
    first: int = 3,
    strength: float = 20,
    margin: float = 1.0,
    k: int = 10,
    without: str = "",
) -> Result:
    names = [n for n in NAMES if n not in without.split(",")]
    server, clients = world.module(), {i: Client(world) for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids, local = world.sampled(t), []
        prior = expected([c.scores for c in clients.values() if c.scored])  # everybody has five validation samples
        for i in ids:
            c, w = clients[i], copied(server)
            world.fit(w, t, i)
            if c.waits < patience and c.turns % own_every == 0:
                world.fit(c.own, t, i)
            c.tuned = copied(w)
            c.turns += 1
            if c.turns in [first * 2**j for j in range(9)]:
                decide(world, c, i, server, names, prior, strength, margin, k)
                c.scored = True
            local.append(w)
        load(server, average(local, [world.sizes[i] for i in ids]))
    prior = expected([c.scores for c in clients.values() if c.scored])
    waits, told = {i: c.waits for i, c in clients.items()}, {i: c.choice for i, c in clients.items() if c.turns}
    logits = {}
    for i, c in clients.items():  # before use, with the newest global model
        few = [n for n in names if n in ("global", "head", "long-head", "neighbours", "head+neighbours")]
        decide(world, c, i, server, names if c.turns else few, prior, strength, margin, k)
        x, of = world.test_part(i)[0], MEANS.get(c.choice, ())
        found = outputs(world, c, i, server, x, k)
        logits[i] = mean([found[m] for m in of], [c.warm[m] for m in of], "near" in of) if of else found[c.choice]
    own = {i: tensors(c.own) for i, c in clients.items()}
    return Result(
        whole=server,
        logits=logits,
        states={i: {"alone": own[i], "waits": waits[i], "turns": c.turns} for i, c in clients.items()},
        server={"choice": {i: names.index(n) for i, n in told.items()}},
    )


def expected(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows).mean(0) if rows else torch.zeros(len(NAMES))


def outputs(world: World, c: Client, client: int, w: nn.Module, x: Tensor, k: int) -> dict[str, Tensor]:
    between = copied(w)
    for name, p in tensors(between).items():
        p.copy_((p + tensors(c.tuned)[name]) / 2)
    train, labels = world.train_part(client)
    keys, rows = features(w, train), []
    models = {"global": w, "tuned": c.tuned, "halfway": between, "own": c.own}
    models |= {"head": with_head(w, keys, labels, 10), "long-head": with_head(w, keys, labels, 30)}
    found = {name: evaluated(m, x) for name, m in models.items()}
    for z in features(w, x):
        squares = (keys - z).square().sum(1)
        near = squares.argsort()[:k]
        close = torch.exp(-(squares[near] - squares[near].min()).double() / len(z))
        rows.append(torch.stack([close[labels[near] == c].sum() for c in range(world.classes)]) / close.sum())
    return {**found, "near": torch.stack(rows).float()}


def with_head(w: nn.Module, z: Tensor, y: Tensor, steps: int) -> nn.Module:
    """The same body with a head that torch's own Nesterov momentum fits to these features."""
    model = copied(w)
    last = head(model)
    rate = 1 / float(z.square().sum(1).mean() + 1)
    opt = torch.optim.SGD(last.parameters(), rate, momentum=0.9, nesterov=True)
    for _ in range(steps):
        opt.zero_grad()
        F.cross_entropy(last(z), y).backward()
        opt.step()
    for p in last.parameters():  # torch keeps the point that is looked ahead to
        p.data += 0.9 * rate * opt.state[p]["momentum_buffer"]
    return model


def mean(members: list[Tensor], warm: list[float], near: bool) -> Tensor:
    parts = [v if near and j == len(members) - 1 else (v / warm[j]).softmax(1) for j, v in enumerate(members)]
    return torch.stack(parts).mean(0).clamp(min=1e-12).log()


def decide(
    world: World,
    c: Client,
    client: int,
    w: nn.Module,
    names: list[str],
    prior: Tensor,
    strength: float,
    margin: float,
    k: int,
) -> None:
    x, y = world.val_part(client)
    found = outputs(world, c, client, w, x, k)
    c.warm = {"near": 1.0}
    for name in SINGLES:
        costs = {
            t: float(F.cross_entropy(found[name] / t, y, reduction="sum")) + 2 * math.log(t) ** 2
            for t in (0.5 * 2 ** (j / 2) for j in range(7))
        }
        c.warm[name] = min(costs, key=costs.__getitem__)
    nats, wrong = {}, {}
    for name in NAMES:
        of = MEANS.get(name)
        out = mean([found[m] for m in of], [c.warm[m] for m in of], "near" in of) if of else found[name] / c.warm[name]
        nats[name] = -float(F.cross_entropy(out, y, reduction="sum"))
        wrong[name] = (out.argmax(1) != y).float()
    total = {n: nats[n] + strength * float(prior[NAMES.index(n)]) for n in names}
    c.choice = max(total, key=total.__getitem__)
    if "own" in names:
        gap = wrong[c.choice] - wrong["own"]
        if float(gap.sum()) > margin * float(gap.square().sum().sqrt()):
            c.choice = "own"
        better = -nats["own"] / len(y) < c.lowest
        c.lowest = min(c.lowest, -nats["own"] / len(y))
        c.waits = 0 if better else c.waits + 1
    c.scores = torch.tensor([nats[n] / len(y) for n in NAMES])


CASES = [
    Case("autopilot", reference, {"own_every": 2, "first": 1, "strength": 5}, {"epochs": 2, "rounds": 4}),
    Case(
        "autopilot",
        reference,
        {"own_every": 1, "first": 1, "patience": 1, "margin": 0.0, "k": 3, "without": "tuned,halfway"},
        {"rounds": 4, "momentum": 0.5},
        models=("mlp",),
        tag="fewer candidates",
    ),
]
