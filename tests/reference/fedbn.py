"""FedBN: batch norm stays with its client, everything else is averaged."""

from torch import Tensor, nn

from reference import BOTH, About, Case, Result, World, average, copied, evaluated, load, norms, tensors

ABOUT = About(
    BOTH,
    (
        "mean by samples (`weighting = uniform`; the authors' clients are of equal size)",
        "a client that never trained is scored with batch-norm statistics of its own data (`recalibrate = False`)",
    ),
)


def norm_names(model: nn.Module) -> list[str]:
    layers = {k for k, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    return [k for k in tensors(model) if k.rsplit(".", 1)[0] in layers]


def recalibrated(model: nn.Module, x: Tensor) -> nn.Module:
    """With the mean and variance of what enters each batch norm, one after the other."""
    model = copied(model)
    for norm in norms(model):
        seen: list[Tensor] = []
        hook = norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        evaluated(model, x)
        hook.remove()
        norm.running_mean.copy_(seen[0].mean((0, 2, 3)))
        norm.running_var.copy_(seen[0].var((0, 2, 3), correction=0))
    return model


def reference(world: World, recalibrate: bool = True, weighting: str = "samples") -> Result:
    own, trained = {i: world.module() for i in world.clients}, set()
    apart = norm_names(own[0])
    shared = {k: v for k, v in tensors(world.module()).items() if k not in apart}
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        for i in ids:
            world.fit(load(own[i], shared), t, i)
        trained |= set(ids)
        mean = average([own[i] for i in ids], [world.sizes[i] for i in ids] if weighting == "samples" else None)
        shared = {k: mean[k] for k in shared}
    for i in world.clients:
        load(own[i], shared)
        if i not in trained and recalibrate:
            own[i] = recalibrated(own[i], world.train_part(i)[0])
    return Result(own)


CASES = [
    Case("fedbn", reference, models=("cnn",)),
    Case("fedbn", reference, {"recalibrate": False}, {"weighting": "uniform"}, ("cnn",), "authors"),
]
