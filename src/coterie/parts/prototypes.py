"""Class prototypes with presence masks: means, losses, group means and mixing (FedPC, FedProto, FedGH).

A prototype set is a tensor [..., classes, d] with a boolean mask [..., classes]; absent classes hold zeros. Functions
used in losses have static shapes and no data-dependent branches, so that they can be mapped over clients.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.errors import unknown
from coterie.parts.similarity import map_similarity, normalise_rows, softmax_rows

ProtoLoss = Literal["batch_mean", "per_sample", "mse"]
GroupMap = Literal["clip", "shift01", "softmax"]
EPS = 1e-12  # under the root: a finite gradient where mean and prototype coincide
FAR = -1e9  # logit of an absent class; finite, so that a row without any class has no NaN gradient


class Prototypes(NamedTuple):
    value: Tensor  # [..., classes, d]
    mask: Tensor  # [..., classes] bool


def one_hot(y: Tensor, classes: int, weight: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., batch, classes], rows scaled by weight [..., batch] (0 for padding)."""
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
    """Prototypes over all of x in one clean pass, and counts [classes]; summed in float64, so any chunk size agrees."""
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


def distances(z: Tensor, target: Tensor) -> Tensor:
    """Euclidean distance over the last axis, with a finite gradient at 0."""
    return ((z - target).square().sum(-1) + EPS).sqrt()


def prototype_loss(
    z: Tensor,
    y: Tensor,
    prototypes: Prototypes,
    kind: ProtoLoss = "batch_mean",
    reduce: Literal["sum", "mean"] = "sum",
    repulsion: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Pull of features z [batch, d] towards the prototypes of their classes; classes without one add nothing.

    batch_mean: distance of the batch's class means, per class. per_sample: distance of every sample. mse: squared
    distance of every sample, mean over the d entries (FedProto). `reduce` acts over the classes or samples that count.
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
    each = (points - target).square().mean(-1) if kind == "mse" else distances(points, target)
    if repulsion:
        logits = (-distances(points.unsqueeze(-2), value)).masked_fill(~mask, FAR)
        each = each - repulsion * (logits.log_softmax(-1) * own).sum(-1)
    total = (each * counts).sum()
    if reduce == "sum":
        return total
    if reduce == "mean":
        return total / counts.sum().clamp(min=1)
    raise unknown("proto.reduce", reduce, ("sum", "mean"))


def nearest_logits(z: Tensor, prototypes: Prototypes) -> Tensor:
    """Scores [batch, classes]: minus the distance to each prototype, far below all others for absent classes."""
    return (-torch.cdist(z, prototypes.value)).masked_fill(~prototypes.mask, FAR)


def masked_mix(rows: Tensor, prototypes: Prototypes) -> Prototypes:
    """Mixtures [m, classes, d] of n prototype sets by rows [m, n], each class over the sets that hold it.

    A class is present in a mixture if a set that holds it has positive weight.
    """
    value, mask = prototypes
    rows = rows.to(value)
    held = mask.to(value)
    total = rows @ held
    sums = torch.einsum("mn,nkd->mkd", rows, value * held.unsqueeze(-1))
    return from_sums(sums, total)


def masked_mean(prototypes: Prototypes, weight: Tensor | None = None) -> Prototypes:
    """Mean [classes, d] over the sets [n, classes, d] that hold a class, by weight [n] (default: equal)."""
    rows = torch.ones(1, len(prototypes.mask)) if weight is None else weight[None]
    value, mask = masked_mix(rows, prototypes)
    return Prototypes(value[0], mask[0])


def group_means(prototypes: Prototypes, groups: Tensor, count: int, weight: Tensor | None = None) -> Prototypes:
    """masked_mean within each of `count` groups [n]: [groups, classes, d]."""
    return masked_mix(one_hot(groups, count, weight, torch.float64).T, prototypes)


def group_cosine(prototypes: Prototypes) -> tuple[Tensor, Tensor]:
    """Cosines [j, j] of sets flattened over their common classes (1 on the diagonal), and who has common classes."""
    value, mask = prototypes
    held = mask.double()
    p = value.double() * held.unsqueeze(-1)
    product = p.flatten(1) @ p.flatten(1).T
    norms = (p.square().sum(-1) @ held.T).sqrt()  # [j, q]: norm of j over the classes of q
    scale = norms * norms.T
    cos = torch.where(scale > 0, product / torch.where(scale > 0, scale, 1.0), 0.0).clamp(-1, 1)
    eye = torch.eye(len(value), dtype=torch.bool, device=value.device)
    return torch.where(eye, 1.0, cos), (held @ held.T > 0) | eye


def group_weights(prototypes: Prototypes, sim_map: GroupMap = "clip") -> Tensor:
    """rho [j, j], rows that sum to 1: how much of group q enters group j; no common class, no mixing."""
    cos, common = group_cosine(prototypes)
    if sim_map == "softmax":
        return softmax_rows(cos, known=common)
    if sim_map not in ("clip", "shift01"):
        raise unknown("sim_map", sim_map, ("clip", "shift01", "softmax"))
    similarity = torch.where(common, map_similarity(cos, sim_map), 0.0)
    return normalise_rows(similarity, torch.eye(len(cos), device=cos.device))
