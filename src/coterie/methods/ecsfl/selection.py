"""Selection of devices by the distance of their models from the model that the edge handed out."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from coterie.core.method import Upload
from coterie.errors import CoterieError, unknown

DistanceNorm = Literal["none", "per_step", "per_param_layer"]
Rule = Literal["nearest", "farthest", "random"]


def model_distances(
    stacked: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    norm: DistanceNorm = "none",
    steps: Tensor | None = None,
) -> Tensor:
    """Return the L2 distances [n], float64, of n stacked models from the reference, over the names of `stacked`.

    Equations (1) to (4); Algorithm 1, lines 1 to 4.

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
    """Return max(1, ceil(fraction * devices)), tolerating the rounding of the product (0.07 * 100 is 7)."""
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
) -> list[int]:
    """Return the positions of the chosen devices in order of id; at most `count`, ties by lower id."""
    order = usable(distances, ids, d_min)
    d = distances[order]
    if rule == "nearest":
        picked = d.sort(stable=True).indices
    elif rule == "farthest":
        picked = d.sort(descending=True, stable=True).indices
    elif rule == "random":
        picked = torch.randperm(len(order), generator=rng)
    else:
        raise unknown("selection rule", rule, ("nearest", "farthest", "random"))
    return [order[i] for i in sorted(picked[:count].tolist())]


def usable(distances: Tensor, ids: Sequence[int], d_min: float) -> list[int]:
    """Return the positions of the devices that may be chosen, in order of id.

    Devices nearer than d_min carry no update, and devices without a finite distance have diverged.
    """
    fit = (distances >= d_min) & distances.isfinite()
    return sorted((i for i in range(len(ids)) if fit[i]), key=lambda i: ids[i])


def herd(x: Tensor, count: int) -> list[int]:
    """Return rows of x [n, d] whose mean is near the mean of all; each step adds the row that helps most."""
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
    """Return a random projection [dims] of a vector [p]: every entry is added to one of the sums, with a random sign.

    With equal generators, inner products are kept in expectation, and no matrix [p, dims] is needed.
    """
    to = torch.randint(dims, update.shape, generator=rng).to(update.device)
    sign = torch.randint(2, update.shape, generator=rng).to(update.device) * 2 - 1
    return update.double().new_zeros(dims).index_add(0, to, update.double() * sign)


def ranks_by_size(uploads: Sequence[Upload]) -> list[int]:
    """Return the devices' ranks by samples, then by id: numbers that do not depend on how devices are numbered."""
    order = sorted(range(len(uploads)), key=lambda i: (uploads[i].samples, uploads[i].sender))
    return [order.index(i) for i in range(len(uploads))]
