"""Training of one head for all clients in which labels that a client lacks get no gradient from it."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.context import Context
from coterie.core.tree import Tree
from coterie.methods.fedgmh.settings import FeatureSettings
from coterie.parts.linear_heads import Heads


def train_common_head(
    ctx: Context,
    stack: Mapping[str, Tensor],
    features: Sequence[Tensor],
    labels: Sequence[Tensor],
    counts: Sequence[Tensor] | None,
    hp: FeatureSettings,
) -> Tree:
    """Return the common head [1, ...] trained on every received feature among the labels of its sender."""
    weight, bias = ctx.net.head_names
    z, y, held = torch.cat(list(features)), torch.cat(list(labels)).long(), held_labels(list(labels), ctx.classes)
    z = F.normalize(z, dim=-1) if hp.feature_norm == "l2" else z
    n = torch.ones(len(z)).to(z) if counts is None else torch.cat(list(counts)).to(z)
    head = Heads(stack[weight][0], stack[bias][0] if bias else None)
    for _ in range(hp.server_steps):
        for part in torch.split(torch.arange(len(z)), hp.server_batch or len(z)):
            head = masked_step(head, z[part], y[part], held[part], n[part], hp.eta_h, hp.head_weight_decay)
    return {weight: head.weight[None]} | ({bias: head.bias[None]} if bias and head.bias is not None else {})


def masked_step(
    head: Heads, z: Tensor, y: Tensor, held: Tensor, weight: Tensor, lr: float, decay: float = 0.0
) -> Heads:
    """One SGD step of a head ([classes, d], [classes]) on the mean cross-entropy of z [v, d] with labels y [v].

    The softmax of a vector runs over the labels that its sender holds [v, classes]: labels that occur together are each
    other's negatives, and a label that a sender lacks gets no gradient from it.
    """
    w, b = head
    logits = z @ w.T if b is None else z @ w.T + b
    error = logits.masked_fill(~held, -torch.inf).softmax(-1) - F.one_hot(y, len(w)).to(z)
    error = error * (weight / weight.sum().clamp(min=1e-12))[:, None]
    new = w - lr * (error.T @ z + decay * w)
    return Heads(new, None if b is None else b - lr * (error.sum(0) + decay * b))


def held_labels(labels: list[Tensor], classes: int) -> Tensor:
    """Return the labels that the sender of each vector holds [v, classes]; a client sends a vector per label."""
    rows = [torch.zeros(classes, dtype=torch.bool).index_fill(0, own.long(), True) for own in labels]
    return torch.cat([row.expand(len(own), -1) for row, own in zip(rows, labels, strict=True)])


def rows_in(own: Mapping[str, Tensor], rows: Mapping[str, Tensor], labels: Tensor) -> Tree:
    """Return a head with these rows [labels, ...] in place of its own."""
    return {k: v.index_copy(0, labels.long(), rows[k]) for k, v in own.items()}
