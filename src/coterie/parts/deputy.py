"""A personal model and its deputy that teach each other (PRR-FL's deputy-enhanced transfer)."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from coterie.parts.distill import kl

Stage = Literal["recover", "exchange", "sublimate"]
LISTENS: dict[str, tuple[bool, bool]] = {  # (personal, deputy)
    "recover": (False, True),
    "exchange": (True, True),
    "sublimate": (True, False),
}


def stage(deputy: float, personal: float, alpha1: float, alpha2: float) -> Stage:
    """Who teaches, from the scores of both: a deputy that is far behind only learns, a good one only teaches."""
    if deputy < alpha1 * personal:
        return "recover"
    return "exchange" if deputy < alpha2 * personal else "sublimate"


def lessons(personal: Tensor, deputy: Tensor, now: Stage, weight: Tensor | None = None) -> Tensor:
    """Sum of KL(teacher || student) over those who listen; teachers are detached."""
    total = personal.new_zeros(())
    if LISTENS[now][0]:
        total = total + kl(deputy, personal, weight)
    return total + kl(personal, deputy, weight) if LISTENS[now][1] else total


@torch.no_grad()
def macro_f1(forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, chunk: int = 512) -> float:
    """Mean F1 over the classes that occur or are guessed, as scikit-learn's (whose call costs more than the pass)."""
    logits = torch.cat([forward(part) for part in torch.split(x, chunk)])
    guess, classes = logits.argmax(1), logits.shape[1]
    hits = torch.bincount(y[guess == y], minlength=classes)
    both = torch.bincount(torch.cat([y, guess]), minlength=classes)
    return float((2 * hits[both > 0] / both[both > 0]).mean())
