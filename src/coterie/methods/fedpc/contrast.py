"""A prototype loss that cannot collapse: it also pushes from other classes, and teaches classes that a client lacks."""

from typing import NamedTuple

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


class Directions(NamedTuple):
    """Return the values that stay the same for all steps of a round."""

    value: Tensor  # [classes, d], of length 1 / tau
    far: Tensor  # [classes], added to the logits: 0, and FAR for classes without a prototype
    there: Tensor  # [classes], 1 for classes with a prototype, else 0


def directions(prototypes: Prototypes, tau: float) -> Directions:
    value, mask = prototypes
    there = mask.to(value.dtype)
    return Directions(_unit(value) / tau, torch.zeros_like(there).masked_fill(~mask, FAR), there)


def towards(z: Tensor, y: Tensor, to: Directions, weight: Tensor | None) -> Tensor:
    """The contrast for prototypes that are directions already."""
    logits = torch.addmm(to.far, _unit(z), to.value.T)
    if weight is None:
        return F.cross_entropy(logits, y, weight=to.there, reduction="sum") / to.there[y].sum().clamp(min=1)
    own = one_hot(y, len(to.value), None, z.dtype)
    counts = own @ to.there
    each = -(logits.log_softmax(-1) * own).sum(-1)
    return (each * counts * weight).sum() / (counts * weight).sum().clamp(min=1)


class Rehearsal(NamedTuple):
    """Prototypes as samples of their classes."""

    value: Tensor  # [classes, d]
    y: Tensor  # [classes]
    weight: Tensor  # [classes]: equal for classes with a prototype, else 0; they sum to 1, or to 0 without any


def rehearsal(prototypes: Prototypes) -> Rehearsal:
    value, mask = prototypes
    there = mask.to(value.dtype)
    return Rehearsal(value, torch.arange(len(value), device=value.device), there / there.sum().clamp(min=1))


def rehearsal_loss(w: Tensor, b: Tensor | None, samples: Rehearsal) -> Tensor:
    """Mean cross-entropy of a classifier [classes, d] on the prototypes as if each were a sample of its class.

    All classes count alike, so a client's private classifier keeps those that it has few or no samples of.
    """
    return F.cross_entropy(F.linear(samples.value, w, b), samples.y, weight=samples.weight, reduction="sum")


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
