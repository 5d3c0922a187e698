"""FedDyn: a dual vector per client makes local optima agree with the global one."""

import torch
from torch import nn

from reference import BOTH, About, Case, Result, World, average, ce, copied, load, tensors

ABOUT = About(
    BOTH,
    (
        "alpha is the same for all clients, as in the paper (`scale_alpha`)",
        "the whole objective is clipped; the paper has no clipping (`clip_first`)",
        "the quadratic term is in the loss, not in the weight decay",
    ),
)


def reference(
    world: World, alpha: float, clip: float | None = 10.0, scale_alpha: bool = False, clip_first: bool = False
) -> Result:
    sent, n = world.module(), len(world.clients)
    mean = copied(sent)
    zero = [torch.zeros_like(p) for p in sent.parameters()]
    h, hbar = {i: [z.clone() for z in zero] for i in world.clients}, zero
    for t in range(1, world.rounds + 1):
        ids, local = world.sampled(t), []
        anchor = [p.detach().clone() for p in sent.parameters()]
        for i in ids:
            a = alpha * sum(world.sizes) / n / world.sizes[i] if scale_alpha else alpha
            model = copied(sent)
            extra = a if clip_first else 0.0
            opt = torch.optim.SGD(model.parameters(), world.rate(t), weight_decay=extra + world.weight_decay)
            for x, y in world.batches(t, i):
                opt.zero_grad()
                loss = ce(model, x, y)
                for p, d, w in zip(model.parameters(), h[i], anchor, strict=True):
                    loss = loss + a * (p * (d - w)).sum() + (0 if clip_first else a / 2 * p.square().sum())
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                opt.step()
            h[i] = [d + p.detach() - w for d, p, w in zip(h[i], model.parameters(), anchor, strict=True)]
            local.append(model)
        load(mean, average(local))
        hbar = [torch.stack([h[i][k] for i in world.clients]).mean(0) for k in range(len(zero))]
        load(sent, tensors(mean))
        for p, d in zip(sent.parameters(), hbar, strict=True):
            p.data += d
    names = [k for k, _ in sent.named_parameters()]
    return Result(dict.fromkeys(world.clients, mean), mean, {"w": sent, "hbar": dict(zip(names, hbar, strict=True))})


CASES = [
    Case("feddyn", reference, {"alpha": 0.3}, {"weight_decay": 0.01}, long=("cnn",)),
    Case(
        "feddyn",
        reference,
        {"alpha": 0.3, "clip": 0.5, "scale_alpha": True, "clip_first": True},
        {"weight_decay": 0.01},
        tag="authors",
    ),
    Case("feddyn", reference, {"alpha": 0.3, "clip": 0.5}, models=("mlp",), tag="clip"),
]
