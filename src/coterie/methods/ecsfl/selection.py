"""Choosing devices by the distance of their models from the one that the edge handed out."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from coterie.core.method import Upload
from coterie.errors import CoterieError, unknown

DistanceNorm = Literal["none", "per_step", "per_param_layer"]
Rule = Literal["nearest", "farthest", "random", "herding"]


def model_distances(
    stacked: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    norm: DistanceNorm = "none",
    steps: Tensor | None = None,
) -> Tensor:
    """L2 distances [n], float64, of n stacked models from the reference, over the names of `stacked`.

    per_step divides by the local steps [n]; per_param_layer counts every tensor by its mean square, so that large
    layers do not drown small ones.
    """
    if norm not in ("none", "per_step", "per_param_layer"):
        raise unknown("distance_norm", norm, ("none", "per_step", "per_param_layer"))
    parts = []
    for name, v in stacked.items():
        square = (v.double() - reference[name].double()).flatten(1).square()
        parts.append(square.mean(1) if norm == "per_param_layer" else square.sum(1))
    d = torch.stack(parts).sum(0).sqrt()
    if norm != "per_step":
        return d
    if steps is None:
        raise ValueError("per_step needs the number of local steps of every device")
    return d / steps.to(d).clamp(min=1)


def select_count(fraction: float, devices: int) -> int:
    """max(1, ceil(fraction * devices)), forgiving the rounding of the product (0.07 * 100 is 7)."""
    if not 0 < fraction <= 1:
        raise CoterieError(f"select_fraction must lie in (0, 1], got {fraction}.")
    return max(1, math.ceil(fraction * devices - 1e-9))


def select(
    distances: Tensor,
    ids: Sequence[int],
    count: int,
    rule: Rule = "nearest",
    d_min: float = 1e-12,
    rng: torch.Generator | None = None,
    updates: Tensor | None = None,
) -> list[int]:
    """Positions of the chosen devices in order of id; at most `count`, ties by lower id.

    Devices nearer than d_min carry no update, and those without a finite distance have diverged: neither is chosen.
    Herding looks at the `updates` [devices, ...] themselves, projected or not.
    """
    usable = (distances >= d_min) & distances.isfinite()
    order = sorted((i for i in range(len(ids)) if usable[i]), key=lambda i: ids[i])
    d = distances[order]
    if rule == "nearest":
        picked = d.sort(stable=True).indices
    elif rule == "farthest":
        picked = d.sort(descending=True, stable=True).indices
    elif rule == "random":
        picked = torch.randperm(len(order), generator=rng)
    elif rule == "herding" and updates is not None:
        picked = torch.tensor(herd(updates[order], count), dtype=torch.int64)
    else:
        raise unknown("selection rule", rule, ("nearest", "farthest", "random", "herding"))
    return [order[i] for i in sorted(picked[:count].tolist())]


def herd(x: Tensor, count: int) -> list[int]:
    """Rows of x [n, d] whose mean is near the mean of all: added one by one, each time the row that helps most."""
    target = x.mean(0)
    chosen: list[int] = []
    total = torch.zeros_like(target)
    for size in range(1, min(count, len(x)) + 1):
        gap = ((total + x) / size - target).square().sum(1)
        gap[chosen] = torch.inf
        chosen.append(int(gap.argmin()))
        total = total + x[chosen[-1]]
    return chosen


def projected(update: Tensor, dims: int, rng: torch.Generator) -> Tensor:
    """A random projection [dims] of a vector [p]: every entry is added to one of the sums, with a random sign.

    With equal generators inner products are kept in expectation, and no matrix [p, dims] is needed.
    """
    to = torch.randint(dims, update.shape, generator=rng)
    sign = torch.randint(2, update.shape, generator=rng) * 2 - 1
    return update.double().new_zeros(dims).index_add(0, to, update.double() * sign)


def ranks_by_size(uploads: Sequence[Upload]) -> list[int]:
    """Numbers for devices that do not depend on their ids: their ranks by samples, then by id."""
    order = sorted(range(len(uploads)), key=lambda i: (uploads[i].samples, uploads[i].sender))
    return [order.index(i) for i in range(len(uploads))]
