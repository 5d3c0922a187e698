"""Class prototypes with presence masks: means and losses (FedPC, FedProto, FedGH).

A prototype set is a tensor [..., classes, d] with a boolean mask [..., classes]; absent classes hold zeros. Functions
used in losses have static shapes and no data-dependent branches, so that they can be mapped over clients.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.errors import unknown

ProtoLoss = Literal["batch_mean", "per_sample", "mse"]
ROOT_OFFSET = 1e-12  # under the root: a finite gradient where mean and prototype coincide
FAR = -1e9  # logit of an absent class; finite, so that a row without any class has no NaN gradient


class Prototypes(NamedTuple):
    value: Tensor  # [..., classes, d]
    mask: Tensor  # [..., classes] bool


def one_hot(y: Tensor, classes: int, weight: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return one-hot rows [..., batch, classes], scaled by weight [..., batch] (0 for padding)."""
    hot = (y.unsqueeze(-1) == torch.arange(classes, device=y.device)).to(dtype)
    return hot if weight is None else hot * weight.unsqueeze(-1).to(dtype)


def class_sums(z: Tensor, y: Tensor, classes: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sums [..., classes, d] and counts [..., classes] of features z [..., batch, d] by label."""
    hot = one_hot(y, classes, weight, z.dtype)
    return hot.transpose(-1, -2) @ z, hot.sum(-2)


def from_sums(sums: Tensor, counts: Tensor) -> Prototypes:
    mask = counts > 0
    safe = torch.where(mask, counts, torch.ones_like(counts))
    return Prototypes(sums / safe.unsqueeze(-1), mask)


def class_means(z: Tensor, y: Tensor, classes: int, weight: Tensor | None = None) -> Prototypes:
    """Mean feature per class of one batch; differentiable."""
    return from_sums(*class_sums(z, y, classes, weight))


@torch.no_grad()
def collect(
    features: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, classes: int, chunk: int = 512
) -> tuple[Prototypes, Tensor]:
    """Return prototypes over all of x from one pass, and counts [classes]; sums are float64, for any chunk size."""
    sums: Tensor | float = 0.0
    dtype = torch.float32
    for part, label in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True):
        z = features(part)
        dtype = z.dtype
        sums = sums + class_sums(z.double(), label, classes)[0]
    counts = torch.bincount(y, minlength=classes)
    assert isinstance(sums, Tensor)
    value, mask = from_sums(sums, counts)
    return Prototypes(value.to(dtype), mask), counts


def row_distances(z: Tensor, target: Tensor) -> Tensor:
    """Euclidean distance over the last axis, with a finite gradient at 0."""
    return ((z - target).square().sum(-1) + ROOT_OFFSET).sqrt()


def prototype_loss(
    z: Tensor,
    y: Tensor,
    prototypes: Prototypes,
    kind: ProtoLoss = "batch_mean",
    reduce: Literal["sum", "mean"] = "sum",
    repulsion: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the loss that pulls features z [batch, d] towards their classes' prototypes; absent ones add nothing.

    batch_mean: distance of the batch's class means, per class; their sum is FedPC's equation (3). per_sample: distance
    of every sample. mse: squared distance of every sample, mean over the d entries (FedProto). `reduce` acts over the
    classes or samples that count.
    `repulsion` weighs a cross-entropy over negative distances to all prototypes, which pushes from the wrong ones.
    """
    value, mask = prototypes
    if kind == "batch_mean":
        points, present = class_means(z, y, len(value), weight)
        own = torch.eye(len(value), dtype=torch.bool, device=z.device)
        counts = (present & mask).to(z.dtype)
    elif kind in ("per_sample", "mse"):
        points = z
        own = one_hot(y, len(value)) > 0
        counts = (own & mask).any(-1).to(z.dtype)
        counts = counts if weight is None else counts * weight
    else:
        raise unknown("proto.loss", kind, ("batch_mean", "per_sample", "mse"))
    target = own.to(z.dtype) @ value
    each = (points - target).square().mean(-1) if kind == "mse" else row_distances(points, target)
    if repulsion:
        logits = (-row_distances(points.unsqueeze(-2), value)).masked_fill(~mask, FAR)
        each = each - repulsion * (logits.log_softmax(-1) * own).sum(-1)
    total = (each * counts).sum()
    if reduce == "sum":
        return total
    if reduce == "mean":
        return total / counts.sum().clamp(min=1)
    raise unknown("proto.reduce", reduce, ("sum", "mean"))


def nearest_logits(z: Tensor, prototypes: Prototypes) -> Tensor:
    """Return scores [batch, classes]: minus the distance to each prototype, far below all others for absent classes."""
    return (-torch.cdist(z, prototypes.value)).masked_fill(~prototypes.mask, FAR)
