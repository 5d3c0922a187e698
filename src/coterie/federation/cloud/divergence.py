"""Tells a diverged model from lying senders: a fault that most answers of a round share is the model's.

An honest client of a diverged model reports an enormous loss, or sends NaN or values out of range. While most senders
do so, no answer counts against its sender, and the model goes back to an earlier state instead.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from coterie.core.context import ClientId
from coterie.engine.round import RoundAnswers, RoundResult

_ENOUGH = 3  # answers that can blame the model
_GROWTH = 1e6  # loss, as a multiple of the lowest median of a round, above which training counts as diverged
_NUMBER = re.compile(r"-?\d[\d.]*(e[+-]?\d+)?")


@dataclass
class DivergenceWatch:
    """The lowest median training loss of a round so far; a program that was started again learns it again."""

    lowest: float = math.inf

    def fault(self, answers: RoundAnswers, result: RoundResult, name: Callable[[ClientId], str]) -> str:
        """Return in words what most answers of a round have in common that the model is to blame for; "" if nothing."""
        answered = {*answers.trained, *result.refused, *result.nonfinite}
        losses = {i: a.loss for i, a in answers.trained.items() if a.steps}
        bound = _GROWTH * max(self.lowest, 1e-3)
        diverged = {i for i, v in losses.items() if not math.isfinite(v) or v > bound} | set(result.nonfinite)
        if finite := sorted(v for v in losses.values() if math.isfinite(v)):
            self.lowest = min(self.lowest, finite[(len(finite) - 1) // 2])
        if len(answered) < _ENOUGH:
            return ""
        if 2 * len(diverged) > len(answered):
            return f"the training of {len(diverged)} of {len(answered)} clients diverged"
        whys = {i: why.removeprefix(f"{name(i)}: ") for i, why in result.refused.items()}
        common = Counter(_NUMBER.sub("#", why) for why in whys.values()).most_common(1)
        if common and 2 * common[0][1] > len(answered):
            example = next(why for why in whys.values() if _NUMBER.sub("#", why) == common[0][0])
            return f"{common[0][1]} of {len(answered)} answers have one fault ({example})"
        return ""
