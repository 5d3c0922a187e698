"""SCAFFOLD, algorithm 1 with option II for the control variates; every client counts the same."""

import torch

from reference import PAPER, About, Case, Result, World, average, ce, copied, load, tensors

ABOUT = About(PAPER, ("no code of the authors was found; PFLlib's and FL-bench's were read",))


def reference(world: World, server_lr: float = 1.0) -> Result:
    server = world.module()
    c = [torch.zeros_like(p) for p in server.parameters()]
    own = {i: [torch.zeros_like(p) for p in server.parameters()] for i in world.clients}
    for t in range(1, world.rounds + 1):
        local, changes = [], []
        for i in world.sampled(t):
            model, steps = copied(server), 0
            opt = world.optimiser(model.parameters(), t)
            for x, y in world.batches(t, i):
                opt.zero_grad()
                ce(model, x, y).backward()
                for p, all_, mine in zip(model.parameters(), c, own[i], strict=True):
                    p.grad += all_ - mine
                opt.step()
                steps += 1
            new = [
                mine - all_ + (a.data - b.data) / (steps * world.rate(t))
                for mine, all_, a, b in zip(own[i], c, server.parameters(), model.parameters(), strict=True)
            ]
            changes.append([n - mine for n, mine in zip(new, own[i], strict=True)])
            own[i] = new
            local.append(model)
        mean, old = average(local), {k: v.clone() for k, v in tensors(server).items()}
        load(server, {k: old[k] + server_lr * (mean[k] - old[k]) for k in old})
        c = [v + sum(change) / len(world.clients) for v, change in zip(c, zip(*changes, strict=True), strict=True)]
    names = [k for k, _ in server.named_parameters()]
    states = {i: {"c": dict(zip(names, own[i], strict=True))} for i in world.clients}
    return Result(dict.fromkeys(world.clients, server), server, {"c": dict(zip(names, c, strict=True))}, states)


CASES = [Case("scaffold", reference), Case("scaffold", reference, {"server_lr": 0.5}, tag="server rate")]
