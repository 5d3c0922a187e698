"""Per-FedAvg. Fallah, Mokhtari, Ozdaglar, NeurIPS 2020 (arXiv 2002.07948).

The shared model is an initial model from which one gradient step on a client's own data does well: clients descend the
loss after such an inner step, by its first-order approximation (FO) or with the Hessian by differences of gradients
(HF). The outer rate b is the run's lr unless set (0.001 in public implementations). The view `adapted` scores a copy
after the inner step. Batch-norm statistics change in the outer pass only, not in the inner step or the Hessian.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Method, Phase, Settings, Start
from coterie.core.tree import Tree
from coterie.parts.gradient import grad, still


class PerFedAvgSettings(Settings):
    variant: Literal["fo", "hf"] = Field("fo", description="first-order, or Hessian by differences of gradients")
    alpha: float = Field(0.01, ge=0, description="rate a of the inner step")
    beta: float | None = Field(None, gt=0, description="rate b of the outer step; empty: the run's lr")
    delta: float = Field(1e-3, gt=0, description="half width of the difference of gradients (hf)")
    adapt_steps: int = Field(1, ge=0, description="inner steps, one batch each, before a copy is scored")


class PerFedAvgHFSettings(PerFedAvgSettings):
    variant: Literal["fo", "hf"] = Field("hf", description="first-order, or Hessian by differences of gradients")


def meta_gradient(
    losses: Sequence[Callable[[Tree], Tensor]],
    w: Tree,
    names: Iterable[str],
    a: float,
    delta: float,
    stats: Iterable[str] = (),
) -> Tree:
    """Return the gradient of f(w - a grad f(w)), with losses on D, D' (first-order), and D'' for the Hessian."""
    names, stats = list(names), list(stats)
    inner = grad(losses[0], still(w, stats), names)
    g = grad(losses[1], {**w, **T.add(T.keep(w, names.__contains__), inner, -a)}, names)
    if len(losses) == 2:
        return g
    ahead, behind = (
        grad(losses[2], {**still(w, stats), **T.add(T.keep(w, names.__contains__), g, sign * delta)}, names)
        for sign in (1, -1)
    )
    return T.add(g, T.sub(ahead, behind), -a / (2 * delta))


class PerFedAvg(Method):
    Settings = PerFedAvgSettings
    hp: PerFedAvgSettings
    card = Card(
        "Per-FedAvg",
        "Fallah et al., NeurIPS 2020, arXiv 2002.07948",
        2020,
        "F",
        personal="an adapted copy",
        certainty="B",
    )
    weighting = "uniform"

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        return start.adding(b=self.ctx.lr_at(round) if self.hp.beta is None else self.hp.beta)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(update=self.outer, batches_per_step=2 if self.hp.variant == "fo" else 3)]

    def _names(self, params: Tree) -> list[str]:
        return [k for k in params if k in self.ctx.net.trainable]

    def outer(self, params: Tree, batches: Sequence[Batch], extras: Extras, rng: torch.Generator) -> Tree:
        losses = [lambda p, b=b: self.loss(p, b, extras) for b in batches]
        names, stats = self._names(params), self.ctx.group("bn_stats")
        gradient = meta_gradient(losses, params, names, self.hp.alpha, self.hp.delta, stats)
        return {**params, **T.add(T.keep(params, names.__contains__), gradient, -extras["b"])}

    def inner(self, params: Tree, batch: Batch, extras: Extras, rng: torch.Generator) -> Tree:
        names, stats = self._names(params), self.ctx.group("bn_stats")
        gradient = grad(lambda p: self.loss(p, batch, extras), still(params, stats), names)
        return {**params, **T.add(T.keep(params, names.__contains__), gradient, -self.hp.alpha)}

    def adapt(self) -> list[Phase]:
        return [Phase(update=self.inner, steps=self.hp.adapt_steps)]

    @property
    def in_use(self) -> Literal["personal", "adapted"]:
        return "adapted" if self.hp.adapt_steps > 0 else "personal"


class PerFedAvgHF(PerFedAvg):
    Settings = PerFedAvgHFSettings
    hp: PerFedAvgHFSettings
    card = replace(PerFedAvg.card, title="Per-FedAvg (HF)")
