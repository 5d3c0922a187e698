"""FedAP (f-FedAP): after rounds of FedBN clients mix models by what their batch-norm layers see."""

import torch
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, copied, evaluated, load, norms, tensors
from reference.fedbn import norm_names, recalibrated

ABOUT = About(
    CODE,
    (
        "the common model comes from rounds of FedBN, not from public data (the authors' variant f-FedAP)",
        "absent clients take part in mixtures with their last model",
    ),
)


def reference(world: World, mu: float = 0.5, warm: float = 0.5, layers: str = "all") -> Result:
    own, trained, last = {i: world.module() for i in world.clients}, set(), {}
    apart = norm_names(own[0])
    shared = {k: v for k, v in tensors(world.module()).items() if k not in apart}
    exchange = int(warm * world.rounds) + 1
    weights = torch.zeros(0)
    for t in range(1, world.rounds + 1):
        if t == exchange:
            seen = [_inputs(load(copied(own[i]), shared), world.train_part(i)[0], layers) for i in world.clients]
            weights = _weights(seen, mu)
            last = dict.fromkeys(world.clients, shared)
            continue
        ids = world.sampled(t)
        start = {i: average(list(last.values()), weights[i].tolist()) if last else shared for i in ids}
        for i in ids:
            world.fit(load(own[i], start[i]), t, i)
        trained |= set(ids)
        if last:
            last |= {i: {k: tensors(own[i])[k].clone() for k in shared} for i in ids}
        else:
            mean = average([own[i] for i in ids], [world.sizes[i] for i in ids])
            shared = {k: mean[k] for k in shared}
    clients = {}
    for i in world.clients:
        model = load(copied(own[i]), average(list(last.values()), weights[i].tolist()))
        clients[i] = model if i in trained else recalibrated(model, world.train_part(i)[0])
    return Result(clients)


def _inputs(model: nn.Module, x: Tensor, layers: str) -> list[Tensor]:
    """Means and deviations of what enters each batch norm [2 * channels]."""
    out: list[Tensor] = []

    def look(_: nn.Module, args: tuple[Tensor]) -> None:
        z = args[0].double()
        out.append(torch.cat([z.mean((0, 2, 3)), z.var((0, 2, 3), correction=0).sqrt()]))

    hooks = [norm.register_forward_pre_hook(look) for norm in norms(model)]
    evaluated(model, x)
    for hook in hooks:
        hook.remove()
    return out if layers == "all" else out[-1:]


def _weights(seen: list[list[Tensor]], mu: float) -> Tensor:
    n = len(seen)
    A = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            if i != j:
                A[i, j] = 1 / sum((a - b).norm() for a, b in zip(seen[i], seen[j], strict=True))
    return (1 - mu) * A / A.sum(1, keepdim=True) + mu * torch.eye(n)


CASES = [
    Case("fedap", reference, {"warm": 0.4}, {"rounds": 5}, ("cnn",)),
    Case("fedap", reference, {"warm": 0.25, "layers": "last", "mu": 0.3}, {"rounds": 4}, ("cnn",), "last"),
]
