"""pFedMe and CGPFL: theta solves a proximal problem at w_i by inner steps, w_i moves towards theta."""

import torch
from torch import nn

from reference import BOTH, About, Case, Result, World, average, ce, copied, load, norms, two_means, vector

ABOUT = {
    "pfedme": About(
        BOTH,
        (
            "only participants train; the authors' others train too and do not upload",
            "theta has no weight decay (0.001 in the authors' code)",
            "scored is theta; the authors' list of it is overwritten before it is scored",
        ),
    ),
    "cgpfl": About(
        "published objective (reconstruction)",
        (
            "order of updates, step sizes and server rule are our reading; no code was found",
            "no CGPFL-Heur",
        ),
    ),
}


def local(
    world: World, t: int, i: int, w: nn.Module, lam: float, inner_steps: int, personal_lr: float, steps: int | None
) -> tuple[nn.Module, nn.Module]:
    """theta and w_i after a local training from w."""
    theta, w = copied(w), copied(w)
    for x, y in world.batches(t, i, steps=steps):
        for _ in range(inner_steps):
            theta.zero_grad()
            ce(theta, x, y).backward()
            for p, q in zip(theta.parameters(), w.parameters(), strict=True):
                p.data = p.data - personal_lr * (p.grad + lam * (p.data - q.data))
        for p, q in zip(theta.parameters(), w.parameters(), strict=True):
            q.data = q.data - world.rate(t) * lam * (q.data - p.data)
    for a, b in zip(norms(w), norms(theta), strict=True):
        a.load_state_dict({**a.state_dict(), "running_mean": b.running_mean, "running_var": b.running_var})
    return theta, w


def pfedme(world: World, beta: float = 1.0, **settings) -> Result:  # type: ignore[no-untyped-def]
    server, theta = world.module(), {}
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        done = {i: local(world, t, i, server, **settings) for i in ids}
        theta |= {i: pair[0] for i, pair in done.items()}
        mean = average([done[i][1] for i in ids], [world.sizes[i] for i in ids])
        load(server, average([server, mean], [1 - beta, beta]))
    return Result({i: theta.get(i, server) for i in world.clients}, server)


def cgpfl(world: World, groups: int, beta: float = 1.0, **settings) -> Result:  # type: ignore[no-untyped-def]
    assert groups == 2
    contexts, of, theta, kept, grouped = [world.module() for _ in range(2)], {}, {}, {}, False

    def context(i: int) -> nn.Module:
        count = [list(of.values()).count(g) for g in (0, 1)]
        return contexts[of.get(i, int(count[1] > count[0]))]

    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        done = {i: local(world, t, i, context(i), **settings) for i in ids}
        theta |= {i: pair[0] for i, pair in done.items()}
        kept |= {i: pair[1] for i, pair in done.items()}
        points = torch.stack([vector(m) for m in kept.values()])
        if not grouped:
            contexts, labels = [copied(contexts[0]) for _ in range(2)], two_means(points)
            grouped = True
        else:
            centres, labels = torch.stack([vector(c) for c in contexts]), None
            while True:  # Lloyd
                new = torch.cdist(points.double(), centres.double()).argmin(1).tolist()
                if new == labels:
                    break
                labels = new
                rows = [[k for k, c in enumerate(labels) if c == g] for g in (0, 1)]
                centres = torch.stack([points[r].mean(0) if r else centres[g] for g, r in enumerate(rows)])
        of = dict(zip(kept, labels, strict=True))
        for g in (0, 1):
            if here := [done[i][1] for i in ids if of[i] == g]:
                load(contexts[g], average([contexts[g], average(here)], [1 - beta, beta]))
    return Result({i: theta.get(i, context(i)) for i in world.clients}, server={"contexts": contexts, "cluster": of})


SETTINGS = {"lam": 5.0, "inner_steps": 3, "personal_lr": 0.05}
CASES = [
    Case("pfedme", pfedme, SETTINGS | {"steps": 5, "beta": 0.7}),
    Case(
        "cgpfl", cgpfl, SETTINGS | {"steps": None, "groups": 2, "beta": 0.7}, {"rounds": 4, "epochs": 2}, long=("cnn",)
    ),
]
