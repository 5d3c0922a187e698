"""FedSoft: clients draw near several cluster models at once; each cluster averages clients drawn by importance."""

import torch
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, copied, evaluated, load, parameters, squares

ABOUT = About(
    CODE,
    (
        "an estimate of importance decides on the draws of the next round, not of the same one",
        "the run's participants are divided evenly among the clusters",
        "a client that never trained is scored with the mean of the clusters' models by its importance",
    ),
)


def reference(world: World, groups: int, interval: int, lam: float = 0.1, smoother: float = 1e-4) -> Result:
    centres, own = [world.start(g) for g in range(groups)], {i: world.module() for i in world.clients}
    n, trained = len(world.clients), set()
    m = max(1, int(world.join * n + 0.5))

    def estimate(i: int) -> list[float]:
        x, y = world.train_part(i)
        table = torch.stack([nn.functional.cross_entropy(evaluated(c, x), y, reduction="none") for c in centres])
        counts = [int((table.argmin(0) == s).sum()) for s in range(groups)]
        return [c / len(y) if c else smoother for c in counts]

    used = {i: estimate(i) for i in world.clients}
    for t in range(1, world.rounds + 1):
        v = torch.tensor([[world.sizes[i] * u for u in used[i]] for i in world.clients], dtype=torch.float32).double()
        if t % interval == 0:
            used = {i: estimate(i) for i in world.clients}
        rng = world.rng("clusters", t)
        each = max(1, int(m / groups + 0.5))
        chosen = [
            list(world.clients)
            if m == n
            else sorted(torch.multinomial(v[:, s].contiguous(), each, generator=rng).tolist())
            for s in range(groups)
        ]
        for i in sorted({i for ids in chosen for i in ids}):
            anchors = [parameters(c) for c in centres]

            def loss(
                model: nn.Module, x: Tensor, y: Tensor, u: list[float] = used[i], anchors: list[list[Tensor]] = anchors
            ) -> Tensor:
                pull = sum(share * squares(model, a) for share, a in zip(u, anchors, strict=True))
                return nn.functional.cross_entropy(model(x), y) + lam / 2 * pull

            world.fit(own[i], t, i, loss)
            trained.add(i)
        for s, ids in enumerate(chosen):
            load(centres[s], average([own[i] for i in ids], v[ids, s].tolist() if m == n else None))
    mixed = {i: load(world.module(), average(centres, estimate(i))) for i in world.clients if i not in trained}
    return Result({i: mixed.get(i, copied(own[i])) for i in world.clients}, server={"models": centres})


CASES = [
    Case("fedsoft", reference, {"groups": 2, "interval": 2, "lam": 0.5}, {"rounds": 4}),
    Case("fedsoft", reference, {"groups": 3, "interval": 1, "smoother": 0.01}, {"join": 1.0}, tag="all"),
    Case("fedsoft", reference, {"groups": 2, "interval": 3, "lam": 1.0}, {"join": 0.2, "epochs": 2}, tag="few"),
]
