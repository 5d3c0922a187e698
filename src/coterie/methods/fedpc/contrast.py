"""A pull to the own class's prototype that is also a push from all others: it cannot be met by collapsing."""

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


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
