"""One head for all clients that still does not let labels interfere: nobody is asked about labels it does not have."""

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.parts.linear_heads import Heads


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
    """[v, classes]: what the sender of each vector holds; a client sends one vector per label [labels]."""
    rows = [torch.zeros(classes, dtype=torch.bool).index_fill(0, own.long(), True) for own in labels]
    return torch.cat([row.expand(len(own), -1) for row, own in zip(rows, labels, strict=True)])
