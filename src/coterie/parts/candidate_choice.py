"""A choice among candidates by validation data, shrunk towards what is known from other clients."""

from collections.abc import Sequence

import torch
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

    `sums` and `prior` [candidates], `errors` [candidates, samples]; the first of equals.
    """
    best = int(shrunk(sums, prior, strength).argmax())
    if own is not None and best != own and is_behind(errors[best], errors[own], margin):
        return own, True
    return best, False


def temperatures(logits: Sequence[Tensor], y: Tensor) -> list[float]:
    """For each of these logits [samples, classes] the one of TEMPERATURES that is most likely, 1 being likely
    beforehand.
    """
    if not len(y):
        return [1.0] * len(logits)
    t = torch.tensor(TEMPERATURES)
    found = (torch.stack(list(logits))[None] / t[:, None, None, None]).log_softmax(-1)  # [T, models, samples, classes]
    costs = -found[..., torch.arange(len(y)), y].sum(-1) + CERTAINTY * t.log().square()[:, None]
    return [TEMPERATURES[i] for i in costs.argmin(0).tolist()]


def mixed(outputs: list[Tensor], shares: Tensor) -> Tensor:
    """The weighted mean [batch, outputs] of members' outputs."""
    return torch.einsum("m,mbo->bo", shares.to(outputs[0]), torch.stack(outputs))
