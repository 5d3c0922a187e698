"""What prototypes teach without a collapse: a pull that is also a push from others, and classes that a client lacks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.parts.prototypes import FAR, Prototypes, one_hot

EPS = 1e-6  # under the root: features of length 0 have a finite gradient


def contrast_loss(z: Tensor, y: Tensor, prototypes: Prototypes, tau: float, weight: Tensor | None = None) -> Tensor:
    """Mean over samples of -log softmax over classes of cos(z, P^k) / tau at y; z [batch, d], y [batch].

    Classes without a prototype are left out, and so are their samples. For features at one point and equally many
    samples of each class it is at least log(classes), whatever the prototypes are.
    """
    return towards(z, y, directions(prototypes, tau), weight)


def directions(prototypes: Prototypes, tau: float) -> Prototypes:
    """Of length 1 / tau: what stays the same for all steps of a round."""
    return Prototypes(_unit(prototypes.value) / tau, prototypes.mask)


def towards(z: Tensor, y: Tensor, to: Prototypes, weight: Tensor | None) -> Tensor:
    """The contrast for prototypes that are directions already."""
    value, mask = to
    logits = torch.addmm(_far(mask, z), _unit(z), value.T)
    if weight is None:
        return named(logits, y, mask)
    own = one_hot(y, len(value), None, z.dtype)
    counts = own @ mask.to(z.dtype)
    each = -(logits.log_softmax(-1) * own).sum(-1)
    return (each * counts * weight).sum() / (counts * weight).sum().clamp(min=1)


def named(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy over the samples whose class is in the mask [classes]; 0 without any."""
    there = mask.to(logits.dtype)
    return F.cross_entropy(logits, y, weight=there, reduction="sum") / there[y].sum().clamp(min=1)


def rehearsal_loss(w: Tensor, b: Tensor | None, prototypes: Prototypes) -> Tensor:
    """Cross-entropy of a classifier [classes, d] on the prototypes as if each were a sample of its class; mean.

    All classes count alike, so a client's private classifier keeps those that it has few or no samples of.
    """
    value, mask = prototypes
    return named(F.linear(value, w, b), torch.arange(len(value), device=value.device), mask)


def _far(mask: Tensor, like: Tensor) -> Tensor:
    """What is added to the logits: 0, and FAR for classes without a prototype."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, FAR)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
