"""What prototypes teach without a collapse: a pull that is also a push from others, and classes that a client lacks."""

import torch
from torch import Tensor

from coterie.parts.prototypes import FAR, Prototypes, one_hot

EPS = 1e-6  # under the root: features of length 0 have a finite gradient


def contrast_loss(z: Tensor, y: Tensor, prototypes: Prototypes, tau: float, weight: Tensor | None = None) -> Tensor:
    """Mean over samples of -log softmax over classes of cos(z, P^k) / tau at y; z [batch, d], y [batch].

    Classes without a prototype are left out, and so are their samples. For features at one point and equally many
    samples of each class it is at least log(classes), whatever the prototypes are.
    """
    value, mask = prototypes
    logits = (_unit(z) @ _unit(value).T / tau).masked_fill(~mask, FAR)
    own = one_hot(y, len(value), None, z.dtype)
    counts = own @ mask.to(z.dtype)
    counts = counts if weight is None else counts * weight
    each = -(logits.log_softmax(-1) * own).sum(-1)
    return (each * counts).sum() / counts.sum().clamp(min=1)


def rehearsal_loss(w: Tensor, b: Tensor | None, prototypes: Prototypes) -> Tensor:
    """Cross-entropy of a classifier [classes, d] on the prototypes as if each were a sample of its class; mean.

    All classes count alike, so a client's private classifier keeps those that it has few or no samples of.
    """
    value, mask = prototypes
    logits = value @ w.T if b is None else value @ w.T + b
    there = mask.to(logits.dtype)
    return -(logits.log_softmax(-1).diagonal() * there).sum() / there.sum().clamp(min=1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
