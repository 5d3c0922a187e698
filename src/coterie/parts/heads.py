"""Per-label heads (FedGMH) and the training of heads on mean features (FedGMH, FedGH)."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import CoterieError, unknown
from coterie.parts.masks import criticality, top_share
from coterie.parts.similarity import mix
from coterie.tree import Tree


class Heads(NamedTuple):
    """A stack of linear heads: [heads, outputs, d] and [heads, outputs] (None without bias)."""

    weight: Tensor
    bias: Tensor | None


def label_shares(counts: Tensor) -> Tensor:
    """q [classes] that sums to 1."""
    total = counts.sum()
    if not total > 0:
        raise CoterieError("label shares need at least one training sample.")
    return counts.double() / total


def mix_heads(heads: Mapping[str, Tensor], shares: Tensor) -> Tree:
    """One head from a stacked tree of heads [labels, ...] by shares [labels]."""
    return {k: v[0] for k, v in mix(shares[None], heads).items()}


def average_in(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tree:
    """(own + other) / 2, the write-in of GMH-a and GMH-oa."""
    return {k: (v + other[k]) / 2 for k, v in own.items()}


def critical_mask(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], beta: float, scope: Literal["head", "tensor"] = "head"
) -> Tree:
    """Mask of the floor(beta * L) entries of a head that local training moved most to effect."""
    if not 0 <= beta <= 1:
        raise CoterieError(f"beta must lie in [0, 1], got {beta}.")
    if scope not in ("head", "tensor"):
        raise unknown("mask_scope", scope, ("head", "tensor"))
    return top_share(criticality(before, after), beta, "whole" if scope == "head" else "tensor")


def pack(labels: Tensor, features: Tensor, classes: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Vectors [v, d] sorted by label [v] into [classes, most, d] with weights [classes, most], 0 for padding."""
    order = labels.sort(stable=True).indices
    sorted_labels = labels[order]
    counts = torch.bincount(labels, minlength=classes)
    place = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[sorted_labels]
    most = int(counts.max()) if len(labels) else 0
    out = features.new_zeros(classes, most, features.shape[-1])
    filled = features.new_zeros(classes, most)
    given = features.new_ones(len(labels)) if weight is None else weight.to(features)
    return (
        out.index_put((sorted_labels, place), features[order]),
        filled.index_put((sorted_labels, place), given[order]),
    )


def head_step(
    heads: Heads,
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    lr: float,
    decay: float = 0.0,
    feature_norm: Literal["none", "l2"] = "none",
) -> Heads:
    """One SGD step of every head on its mean cross-entropy; features [heads, v, d], labels and weight [heads, v].

    The gradient is in closed form (softmax minus target, times feature). Heads without weight come back bit for bit.
    """
    if feature_norm not in ("none", "l2"):
        raise unknown("feature_norm", feature_norm, ("none", "l2"))
    z = F.normalize(features, dim=-1) if feature_norm == "l2" else features
    w, b = heads
    logits = z @ w.transpose(1, 2)
    error = (logits if b is None else logits + b[:, None]).softmax(-1)
    error = error - F.one_hot(labels, w.shape[1]).to(error)
    total = weight.sum(1)
    seen = total > 0
    share = weight / torch.where(seen, total, torch.ones_like(total))[:, None]
    error = error * share[..., None]
    new_w = w - lr * (error.transpose(1, 2) @ z + decay * w)
    new_w = torch.where(seen[:, None, None], new_w, w)
    if b is None:
        return Heads(new_w, None)
    return Heads(new_w, torch.where(seen[:, None], b - lr * (error.sum(1) + decay * b), b))


def train_heads(
    heads: Heads,
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    lr: float,
    steps: int = 1,
    batch: int = 0,
    decay: float = 0.0,
    feature_norm: Literal["none", "l2"] = "none",
) -> Heads:
    """`steps` passes of head_step, each over batches of `batch` vectors per head in order (0: all at once)."""
    for _ in range(steps):
        size = batch or max(features.shape[1], 1)
        for z, y, part in zip(*(torch.split(t, size, 1) for t in (features, labels, weight)), strict=True):
            heads = head_step(heads, z, y, part, lr, decay, feature_norm)
    return heads


def label_targets(weight: Tensor) -> Tensor:
    """Targets [labels, v] of per-label heads: head s sees label s only."""
    return torch.arange(len(weight), device=weight.device)[:, None].expand(weight.shape)
