"""Stacks of linear heads and their training on mean features (FedGMH, FedGH)."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import unknown


class Heads(NamedTuple):
    """A stack of linear heads: [heads, outputs, d] and [heads, outputs] (None without bias)."""

    weight: Tensor
    bias: Tensor | None


def head_step(
    heads: Heads,
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    lr: float,
    decay: float = 0.0,
    feature_norm: Literal["none", "l2"] = "none",
) -> Heads:
    """Take one SGD step of every head on its mean cross-entropy; features [heads, v, d], labels and weight [heads, v].

    The gradient is in closed form (softmax minus target, times feature). Heads without weight are returned bit for bit.
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
