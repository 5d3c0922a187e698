"""Statistics of the inputs of a network's layers, and batch norm recalibrated on a client's own data."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.net import Net
from coterie.core.tree import Tree

_CHUNK = 512  # samples of one pass and of one partial sum


class Moments(NamedTuple):
    mean: Tensor  # [channels] float64
    var: Tensor  # [channels] float64, biased


@torch.no_grad()
def input_moments(net: Net, params: Tree, x: Tensor, layers: Sequence[str]) -> list[Moments]:
    """Return mean and variance per channel of each layer's input over all of x; batches are merged exactly."""
    totals: list[Tensor] = []
    for part in torch.split(x, _CHUNK):
        flat = [seen.double().transpose(0, 1).flatten(1) for seen in net.inputs(params, part, layers)[1]]
        counts = [f.new_full((len(f),), f.shape[1]) for f in flat]
        sums = [torch.stack([n, f.sum(1), f.square().sum(1)]) for n, f in zip(counts, flat, strict=True)]
        totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
    out = []
    for count, first, second in totals:
        mean = first / count
        out.append(Moments(mean, (second / count - mean.square()).clamp(min=0)))
    return out


def recalibrated(net: Net, params: Tree, x: Tensor) -> Tree:
    """Return the tree with running statistics measured on x, layer by layer, because each layer feeds the next."""
    out = dict(params)
    if len(x) < 2:
        return out
    for layer in net.layout.of_kind("bn"):
        mean, var = (f"{layer}.{name}" for name in ("running_mean", "running_var"))
        if mean in out and var in out:
            moments = input_moments(net, out, x, [layer])[0]
            out[mean], out[var] = moments.mean.to(out[mean]), moments.var.to(out[var])
    return out
