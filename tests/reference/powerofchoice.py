"""Power-of-Choice (rpow-d): of d candidates those with the highest last mean loss of their local steps take part."""

import torch
from torch import Tensor, nn

from reference import PAPER, About, Case, Result, World, average, ce, copied, load

ABOUT = About(
    PAPER,
    (
        "the variant rpow-d only, whose losses come with the models; pow-d and cpow-d ask all candidates first",
        "numbers of samples are sent in an opening round (`draw = uniform`: not used)",
    ),
)


def reference(world: World, candidates: int | None = None, draw: str = "samples") -> Result:
    server, losses = world.module(), {}  # type: ignore[var-annotated]
    n = len(world.clients)
    m = max(1, int(world.join * n + 0.5))
    for t in range(1, world.rounds + 1):
        d, rng = max(m, min(n, candidates or 2 * m)), world.rng("sample", t)
        sizes = torch.tensor(world.sizes, dtype=torch.float64)
        found = (
            torch.multinomial(sizes, d, generator=rng) if draw == "samples" else torch.randperm(n, generator=rng)[:d]
        )
        ids = sorted(sorted(found.tolist(), key=lambda i: -losses.get(i, float("inf")))[:m])
        local = []
        for i in ids:
            seen: list[Tensor] = []

            def loss(model: nn.Module, x: Tensor, y: Tensor, seen: list[Tensor] = seen) -> Tensor:
                value = ce(model, x, y)
                seen.append(value.detach())
                return value

            local.append(world.fit(copied(server), t, i, loss))
            losses[i] = float(torch.stack(seen).mean())
        load(server, average(local))
    return Result(dict.fromkeys(world.clients, server), server, server={"losses": losses})


CASES = [
    Case("power-of-choice", reference, run={"rounds": 5, "join": 0.34}),
    Case("power-of-choice", reference, {"candidates": 5, "draw": "uniform"}, {"rounds": 4}, models=("mlp",), tag="d"),
]
