"""The official test part (setting `official`, for FedPC's tables): every personal model on it, and one model for all.

A method without a global model is given one for this purpose alone: the mean of the personal models by training
samples, with the mean of their heads or the initial head (`gm_head`). Nothing of it is sent in a federation, so nothing
is counted; a method whose models are not plain (extras, or entries missing) gets none.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from coterie.core.context import ClientId
from coterie.core.method import Method
from coterie.core.tree import Tree
from coterie.data.federation import Federation
from coterie.engine.messages import Score, ScoreAnswer
from coterie.errors import CoterieError
from coterie.train.scoring import score

VIEW = "official"


def check(federation: Federation) -> None:
    if federation.official() is None:
        raise CoterieError(
            "official = true needs an official test part that is not dealt out: data that have one, and pool = train"
        )


class Official:
    """Scores of one model for all clients, in addition to those of the personal models."""

    def __init__(self, method: Method, federation: Federation, head: Literal["mean", "init"] = "mean"):
        self.method, self.federation, self.head = method, federation, head

    def added(self, answers: Sequence[ScoreAnswer], whole: Tree | None, newcomers: set[ClientId]) -> list[ScoreAnswer]:
        """The answers with the score of the model for all, also where a personal model is just that model."""
        model = whole if whole is not None else self._mean([a for a in answers if a.client not in newcomers])
        if model is None:
            return [replace(a, model=None) for a in answers]
        known = self._score(model)
        alike = {} if whole is None else {f"personal/{VIEW}": known}
        return [replace(a, model=None, scores={**alike, **a.scores, f"global/{VIEW}": known}) for a in answers]

    def _score(self, model: Tree) -> Score:
        split = self.federation.official()
        assert split is not None
        return score(self.method, model, {}, split, shared=True)

    def _mean(self, answers: Sequence[ScoreAnswer]) -> Tree | None:
        if not answers or any(a.model is None for a in answers):
            return None
        w0 = self.method.ctx.w0
        sums = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in w0.items()}
        for a in answers:
            for k, total in sums.items():
                assert a.model is not None
                total.add_(a.model[k], alpha=a.samples)
        samples = sum(a.samples for a in answers)
        model = {k: (v / samples).to(w0[k].dtype) for k, v in sums.items()}
        if self.head == "init":
            model |= {k: w0[k] for k in self.method.ctx.group("head")}
        return model
