"""APFL: a second model beside FedAvg's, mixed with it by a weight that is learned."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import CODE, PAPER, About, Case, Result, World, average, ce, copied, evaluated, load

ABOUT = About(
    f"{PAPER} (`rule = paper`), {CODE} (`rule = code`)",
    (
        "outputs are mixed, as in the authors' code, not parameters (paper)",
        "`rule = paper` by default: the other gradient counts alpha twice",
        "`rule = code` knows plain SGD only",
    ),
)


def reference(world: World, rule: str, alpha: float = 0.5, decay: float = 0.02, adaptive: bool = True) -> Result:
    server, v = world.module(), {i: world.module() for i in world.clients}
    a, left = dict.fromkeys(world.clients, alpha), {}
    for t in range(1, world.rounds + 1):
        ids, local = world.sampled(t), []
        for i in ids:
            w = copied(server)
            run = _code if rule == "code" else _paper
            a[i] = run(world, t, i, w, v[i], a[i], decay, adaptive)
            local.append(w)
            left[i] = w
        load(server, average(local, None if rule == "code" else [world.sizes[i] for i in ids]))
    logits = {}
    for i in world.clients:
        x = world.test_part(i)[0]
        w = left.get(i, server) if rule == "code" else server
        logits[i] = a[i] * evaluated(v[i], x) + (1 - a[i]) * evaluated(w, x)
    states = {i: {"v": v[i], "alpha": float(a[i])} for i in world.clients}
    return Result(whole=server, states=states, logits=logits)


def _paper(
    world: World, t: int, i: int, w: nn.Module, v: nn.Module, alpha: float, decay: float, adaptive: bool
) -> float:
    lr = world.rate(t)
    if adaptive:
        x, y = next(world.batches(t, i))
        weight = torch.tensor(alpha, requires_grad=True)
        F.cross_entropy(weight * evaluated(v, x) + (1 - weight) * evaluated(w, x), y).backward()
        alpha = min(1.0, max(0.0, alpha - lr * (float(weight.grad) + decay * alpha)))
    steps = [torch.optim.SGD(m.parameters(), lr) for m in (w, v)]
    for x, y in world.batches(t, i):
        out = w(x)
        losses = [F.cross_entropy(out, y), F.cross_entropy(alpha * v(x) + (1 - alpha) * out.detach(), y)]
        for step, loss in zip(steps, losses, strict=True):
            step.zero_grad()
            loss.backward()
            step.step()
    return alpha


def _code(
    world: World, t: int, i: int, w: nn.Module, v: nn.Module, alpha: float, decay: float, adaptive: bool
) -> float:
    lr = world.rate(t)
    first, second = (torch.optim.SGD(m.parameters(), lr) for m in (w, v))
    for number, (x, y) in enumerate(world.batches(t, i)):
        first.zero_grad()
        ce(w, x, y).backward()
        first.step()
        first.zero_grad()
        second.zero_grad()
        F.cross_entropy(alpha * v(x) + (1 - alpha) * w(x), y).backward()
        second.step()
        if adaptive and number == 0:
            gradient: Tensor | float = 0.0
            for p, q in zip(v.parameters(), w.parameters(), strict=True):
                gradient = gradient + ((p.data - q.data) * (alpha * p.grad + (1 - alpha) * q.grad)).sum()
            alpha = min(1.0, max(0.0, alpha - lr * (float(gradient) + decay * alpha)))
    return alpha


CASES = [
    Case("apfl", reference, {"rule": "paper"}, {"epochs": 2}),
    Case("apfl", reference, {"rule": "code", "alpha": 0.3}, {"epochs": 2, "lr_decay": 0.9}, tag="code"),
    Case("apfl", reference, {"rule": "paper", "adaptive": False, "alpha": 0.7}, models=("mlp",), tag="fixed"),
]
