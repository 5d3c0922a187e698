"""Stacks of linear heads and their training on mean features (FedGMH, FedGH)."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.tree import Tree

HeadNames = tuple[str, str | None]  # names of weight and bias in a tree; None without a bias


class Heads(NamedTuple):
    """A stack of linear heads: [heads, outputs, d] and [heads, outputs] (None without bias)."""

    weight: Tensor
    bias: Tensor | None


def heads_of(names: HeadNames, tree: Mapping[str, Tensor]) -> Heads:
    """Return the heads in a tree, stacked or single."""
    weight, bias = names
    return Heads(tree[weight], tree[bias] if bias else None)


def heads_tree(names: HeadNames, heads: Heads) -> Tree:
    """Return heads, stacked or single, as a tree."""
    weight, bias = names
    return {weight: heads.weight} | ({bias: heads.bias} if bias and heads.bias is not None else {})


def head_step(
    heads: Heads,
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    lr: float,
    decay: float = 0.0,
    held: Tensor | None = None,
) -> Heads:
    """Take one SGD step of every head on its mean cross-entropy; features [heads, v, d], labels and weight [heads, v].

    The gradient is in closed form (softmax minus target, times feature). Heads without weight are returned bit for bit.
    With `held` [heads, v, outputs] the softmax of a vector runs over the outputs that are set.
    """
    w, b = heads
    logits = features @ w.transpose(1, 2)
    logits = logits if b is None else logits + b[:, None]
    error = (logits if held is None else logits.masked_fill(~held, -torch.inf)).softmax(-1)
    error = error - F.one_hot(labels, w.shape[1]).to(error)
    total = weight.sum(1)
    seen = total > 0
    share = weight / torch.where(seen, total, torch.ones_like(total))[:, None]
    error = error * share[..., None]
    new_w = w - lr * (error.transpose(1, 2) @ features + decay * w)
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
    held: Tensor | None = None,
) -> Heads:
    """`steps` passes of head_step, each over batches of `batch` vectors per head in order (0: all at once)."""
    size = batch or max(features.shape[1], 1)
    for _ in range(steps):
        for at in range(0, features.shape[1], size):
            z, y, part = (t[:, at : at + size] for t in (features, labels, weight))
            heads = head_step(heads, z, y, part, lr, decay, None if held is None else held[:, at : at + size])
    return heads
