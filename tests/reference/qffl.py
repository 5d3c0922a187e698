"""q-FedAvg: weights F^q, and a step whose length follows from an estimate of the Lipschitz constant."""

import torch
import torch.nn.functional as F

from reference import CODE, About, Case, Result, World, average, copied, evaluated, load, tensors

ABOUT = About(CODE, ("the paper draws clients by their numbers of samples",))


def reference(world: World, q: float) -> Result:
    server = world.module()
    for t in range(1, world.rounds + 1):
        deltas, hs, local = [], [], []
        start = [p.data.clone() for p in server.parameters()]
        for i in world.sampled(t):
            x, y = world.train_part(i)
            risk = float(F.cross_entropy(evaluated(server, x), y)) + 1e-10
            model = world.fit(copied(server), t, i)
            g = [(a - b.data) / world.rate(t) for a, b in zip(start, model.parameters(), strict=True)]
            square = float(sum(v.square().sum() for v in g))
            deltas.append([risk**q * v for v in g])
            hs.append(q * risk ** (q - 1) * square + risk**q / world.rate(t))
            local.append(model)
        load(server, average(local))  # batch-norm statistics; the parameters follow
        with torch.no_grad():
            for p, a, *ds in zip(server.parameters(), start, *deltas, strict=True):
                p.copy_(a - sum(ds) / sum(hs))
    return Result(dict.fromkeys(world.clients, server), tensors(server))


CASES = [Case("q-ffl", reference, {"q": 1.0}), Case("q-ffl", reference, {"q": 0.2}, tag="small q")]
