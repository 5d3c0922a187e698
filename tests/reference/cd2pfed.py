"""CD2-pFed: the first channels of every layer turn private; private and shared sub-networks teach each other."""

import torch
from torch import Tensor, nn

from reference import About, Case, Result, World, average, ce, copied, head_names, load, tensors

ABOUT = About(
    "published description (reconstruction)",
    (
        "no code was found: ramps, weight of the distillation and averaging over epochs are our reading",
        "no distillation while some layer has no private or no shared channel",
        "a newcomer's private channels are the initial ones (the paper averages the outputs of all clients)",
    ),
)


def reference(
    world: World, p_max: float, ramp: float = 1.0, distil: float = 1.0, average: float = 1.0, average_ramp: int = 1
) -> Result:
    server, own = world.module(), {i: world.module() for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids, private = world.sampled(t), _private(world, t, p_max, ramp)
        split = all(0 < int(m.sum()) < m.numel() for k, m in private.items() if k != head_names(server)[1])
        blend = average * min(1.0, t / average_ramp)
        for i in ids:
            model = _merged(own[i], server, private)
            opt = world.optimiser(model.parameters(), t)
            before = [p.detach().clone() for p in model.parameters()]
            for epoch in world.epochs_of(t, i):
                for x, y in epoch:
                    loss = ce(model, x, y)
                    if split and distil:
                        one, two = (_sub(model, private, keep, x) for keep in (True, False))
                        p, q = one.log_softmax(1), two.log_softmax(1)
                        both = (p.exp() * (p - q)).sum(1).mean() + (q.exp() * (q - p)).sum(1).mean()
                        loss = loss + distil * both / 2
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
                for p, old in zip(model.parameters(), before, strict=True):
                    p.data = blend * p.data + (1 - blend) * old
                before = [p.detach().clone() for p in model.parameters()]
            own[i] = model
        mean = _mean([own[i] for i in ids], [world.sizes[i] for i in ids])
        now = tensors(server)
        load(server, {k: torch.where(private[k], now[k], v) for k, v in mean.items()})
    private = _private(world, world.rounds + 1, p_max, ramp)
    return Result({i: _merged(own[i], server, private) for i in world.clients}, server={"w": server})


_mean = average


def _private(world: World, t: int, p_max: float, ramp: float) -> dict[str, Tensor]:
    length = ramp * world.rounds
    share = p_max * (min(1.0, (t - 1) / length) if length else 1.0)
    out = {}
    weight, bias = head_names(world.module())
    for k, v in tensors(world.module()).items():
        axis = 1 if k == weight else 0
        mask = torch.zeros_like(v, dtype=torch.bool)
        if k != bias:
            mask.narrow(axis, 0, int(share * v.shape[axis] + 1e-9)).fill_(True)
        out[k] = mask
    return out


def _merged(own: nn.Module, server: nn.Module, private: dict[str, Tensor]) -> nn.Module:
    mine, theirs = tensors(own), tensors(server)
    return load(copied(own), {k: torch.where(m, mine[k], theirs[k]) for k, m in private.items()})


def _sub(model: nn.Module, private: dict[str, Tensor], keep: bool, x: Tensor) -> Tensor:
    """The network with the other side's channels at zero; its pass moves no statistics."""
    bias = head_names(model)[1]
    params = {k: p if k == bias else p * (private[k] == keep) for k, p in model.named_parameters()}
    out: Tensor = torch.func.functional_call(copied(model), params, x)
    return out


CASES = [
    Case("cd2-pfed", reference, {"p_max": 0.5, "ramp": 0.3}, {"epochs": 2}),
    Case(
        "cd2-pfed",
        reference,
        {"p_max": 0.6, "average": 0.7, "average_ramp": 2},
        {"epochs": 2},
        tag="ema",
        long=("cnn",),
    ),
]
