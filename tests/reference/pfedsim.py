"""pFedSim: FedAvg first, then bodies mixed by the similarity of the classifiers."""

import torch

from reference import CODE, About, Case, Result, World, average, body_tree, copied, head, load, tensors

ABOUT = About(CODE, ("every similarity is capped at 0.9999, not a client's own alone",))


def reference(world: World, rho: float, score: str = "own") -> Result:
    server, n, first = world.module(), len(world.clients), int(rho * world.rounds + 0.5)
    for t in range(1, first + 1):
        ids = world.sampled(t)
        local = [world.fit(copied(server), t, i) for i in ids]
        load(server, average(local, [world.sizes[i] for i in ids]))
    models, trained = [copied(server) for _ in world.clients], set()
    S = torch.zeros(n, n, dtype=torch.float64)

    def mixed(i: int) -> dict:
        s = S[i].clamp(0, 0.9999)
        s[i] = 0.9999
        return average([body_tree(m) for m in models], (-(1 - s).log()).tolist())

    for t in range(first + 1, world.rounds + 1):
        ids = world.sampled(t)
        start = {i: mixed(i) for i in ids}
        for i in ids:
            world.fit(load(models[i], start[i]), t, i)
        trained |= set(ids)
        for i in ids:
            for j in ids:
                a, b = (head(models[k]).weight.detach().double() for k in (i, j))
                S[i, j] = torch.cosine_similarity(a, b, dim=1).mean().clamp(min=0)
    clients = {}
    for i in world.clients:
        own = score == "own" and i in trained
        clients[i] = models[i] if own else load(copied(models[i]), mixed(i))
    return Result({i: tensors(m) for i, m in clients.items()})


CASES = [
    Case("pfedsim", reference, {"rho": 0.5}, {"rounds": 5, "join": 0.7}),
    Case("pfedsim", reference, {"rho": 0.2, "score": "mixed"}, {"rounds": 5, "join": 0.7}, tag="mixed", long=("cnn",)),
]
