"""A choice among candidates by validation data, shrunk towards the choices of other clients."""

from collections.abc import Sequence

import torch
from torch import Tensor

TEMPERATURES = [0.5 * 2 ** (i / 2) for i in range(7)]  # 0.5 to 4
TEMPERATURE_PENALTY = 2.0  # prior belief in temperature 1: penalty in nats per squared logarithm of the temperature


def shrunk(sums: Tensor, prior: Tensor, strength: float) -> Tensor:
    """Return scores [candidates]: the client's summed log-likelihoods plus `strength` samples of the prior mean."""
    return sums + strength * prior


def is_behind(errors: Tensor, own: Tensor, margin: float) -> bool:
    """True if errors [samples] exceed the own model's by more than `margin` standard errors of their sum."""
    gap = errors - own
    return bool(gap.sum() > margin * gap.square().sum().sqrt())


def choose_candidate(
    sums: Tensor, prior: Tensor, strength: float, errors: Tensor, own: int | None, margin: float
) -> tuple[int, bool]:
    """Return the candidate with the best shrunk score and False, or the own model and True if that candidate is behind.

    `sums` and `prior` are [candidates], `errors` is [candidates, samples]; the first of equal candidates is taken.
    """
    best = int(shrunk(sums, prior, strength).argmax())
    if own is not None and best != own and is_behind(errors[best], errors[own], margin):
        return own, True
    return best, False


def temperatures(logits: Sequence[Tensor], y: Tensor) -> list[float]:
    """Return the most likely of TEMPERATURES for each of these logits [samples, classes], with a prior around 1."""
    if not len(y):
        return [1.0] * len(logits)
    t = torch.tensor(TEMPERATURES, device=y.device)
    scaled = torch.stack(list(logits))[None] / t[:, None, None, None]  # [T, models, samples, classes]
    log_p = scaled.log_softmax(-1)
    costs = (
        -log_p[..., torch.arange(len(y), device=y.device), y].sum(-1) + TEMPERATURE_PENALTY * t.log().square()[:, None]
    )
    return [TEMPERATURES[i] for i in costs.argmin(0).tolist()]


def mixed(outputs: list[Tensor], shares: Tensor) -> Tensor:
    """Return the weighted mean [batch, outputs] of the members' outputs."""
    return torch.einsum("m,mbo->bo", shares.to(outputs[0]), torch.stack(outputs))
