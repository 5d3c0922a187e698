"""The official test part (setting `official`): every personal model on it, and one model for all.

A method without a global model is given one for this purpose alone: the mean of the personal models by training
samples, with the mean of their heads or the initial head (`gm_head`). Nothing of it is sent in a federation, so nothing
is counted; a method whose models are not plain (extras, or entries missing) gets none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from coterie.codec import Value
from coterie.data.federation import Federation
from coterie.errors import CoterieError
from coterie.method import ClientId, Extras, Method
from coterie.train.score import score
from coterie.tree import Tree

if TYPE_CHECKING:
    from coterie.runtimes.workers import Runtime

VIEW = "official"


def check(federation: Federation) -> None:
    if federation.official() is None:
        raise CoterieError(
            "official = true needs an official test part that is not dealt out: data that have one, and pool = train"
        )


def plain(method: Method, federation: Federation, tree: Tree, extras: Extras, shared: bool = False) -> dict[str, Any]:
    """Score of one model on the official part."""
    split = federation.official()
    assert split is not None
    s = score(method, tree, extras, split, shared)
    return {"hits": s.hits, "total": s.total, "loss": float(s.loss)}


class Official:
    """What one evaluation needs beside its requests: the model for all, scored once."""

    def __init__(
        self, runtime: Runtime, method: Method, whole: Tree | None, newcomers: tuple[ClientId, ...], head: str = "mean"
    ):
        self.runtime, self.method, self.newcomers, self.head = runtime, method, set(newcomers), head
        self.sums = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in method.ctx.w0.items()}
        self.samples, self.whole_sum = 0, True
        self.known = None if whole is None else self._ask(whole)

    def _ask(self, model: Tree) -> Value:
        return self.runtime.run([{"op": "whole", "round": 0, "model": model, "jobs": [{"client": -1}]}])[0][0]

    def take(self, answers: list[Value]) -> None:
        """Take the personal models out of the answers and add them up, in order."""
        for a in answers:
            model, n = a.pop("model", None), a.pop("samples", 0)
            if a["client"] in self.newcomers or self.known is not None:
                continue
            if model is None:
                self.whole_sum = False
                continue
            self.samples += n
            for k, total in self.sums.items():
                total.add_(model[k], alpha=n)

    def finish(self, answers: list[Value]) -> None:
        """The model for all has one score, written beside every client's."""
        if self.known is None and self.whole_sum and self.samples:
            w0 = self.method.ctx.w0
            model = {k: (v / self.samples).to(w0[k].dtype) for k, v in self.sums.items()}
            if self.head == "init":
                model |= {k: w0[k] for k in self.method.ctx.group("head")}
            self.known = self._ask(model)
        if self.known is not None:
            for a in answers:
                a[f"global/{VIEW}"] = self.known
