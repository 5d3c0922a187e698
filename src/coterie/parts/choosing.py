"""A choice among candidates by validation data, shrunk towards what is known from other clients."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TEMPERATURES = [0.5 * 2 ** (i / 2) for i in range(7)]  # 0.5 to 4
CERTAINTY = 2.0  # of temperature 1, as a penalty in nats per squared logarithm


def shrunk(sums: Tensor, prior: Tensor, strength: float) -> Tensor:
    """Scores [candidates]: the client's summed log-likelihoods, and `strength` samples of the federation's mean."""
    return sums + strength * prior


def is_behind(errors: Tensor, own: Tensor, margin: float) -> bool:
    """Are errors [samples] larger than the own model's by more than `margin` standard errors of their sum?"""
    gap = errors - own
    return bool(gap.sum() > margin * gap.square().sum().sqrt())


def choose(
    sums: Tensor, prior: Tensor, strength: float, errors: Tensor, own: int | None, margin: float
) -> tuple[int, bool]:
    """The candidate with the best shrunk score, or the own model where that candidate is behind it; and whether it is.

    `sums` and `prior` [candidates], `errors` [candidates, samples]; the first of equals."""
    best = int(shrunk(sums, prior, strength).argmax())
    if own is not None and best != own and is_behind(errors[best], errors[own], margin):
        return own, True
    return best, False


def temperature(logits: Tensor, y: Tensor) -> float:
    """The one of TEMPERATURES that is most likely, 1 being likely beforehand."""
    costs = [
        float(F.cross_entropy(logits / t, y, reduction="sum")) + CERTAINTY * math.log(t) ** 2 for t in TEMPERATURES
    ]
    return TEMPERATURES[min(range(len(costs)), key=costs.__getitem__)] if len(y) else 1.0


def mixed(outputs: list[Tensor], shares: Tensor) -> Tensor:
    """The weighted mean [batch, outputs] of members' outputs."""
    return torch.einsum("m,mbo->bo", shares.to(outputs[0]), torch.stack(outputs))
