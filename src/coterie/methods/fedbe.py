"""FedBE. Chen, Chao, ICLR 2021 (arXiv 2009.01974).

FedAvg whose server takes a Bayesian view of its participants' models. It draws further models from a distribution
fitted to them, averages the predictions of all models on the public set, sharpens them, and trains the mean model to
predict the same. The result is the new global model.
- gaussian: for each entry the directions of the updates are normalised; a drawn model adds their mean plus noise with
  their variance, times the mean length. dirichlet: a drawn model is a random convex combination of the models.
- The ensemble holds the mean, the drawn models and the participants' own. The student learns by SGD with momentum.
  The result is the mean of its weights at every `swa_every`-th step, after the share `swa_start` of the steps (SWA).
Departures: batch-norm statistics are not drawn, those of the mean are used. SWA has a constant rate, as in the authors'
code (a cycle in the paper), and starts after a share of the steps, because public sets differ in size (500 there, a
third of their steps). If the server's training diverges, the mean is the new global model.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import State
from coterie.core.method import Card, Method, Settings, Upload
from coterie.core.tree import Tree
from coterie.parts.gradient import grad
from coterie.parts.idle_settings import refuse_idle

DIRECTION_VARIANCE = 1e-5  # variance of a direction, the authors' constant
LEAST_SHARPENED = 1e-8  # probability before sharpening, the authors' constant
STUDENT_MOMENTUM, STUDENT_DECAY = 0.9, 1e-5  # momentum and weight decay of the student's SGD, the authors' constants


class FedBESettings(Settings):
    draw: Literal["gaussian", "dirichlet"] = Field("gaussian", description="distribution of the drawn models")
    models: int = Field(10, ge=0, description="models drawn in addition to the mean and the participants' models")
    spread: float = Field(0.1, ge=0, description="gaussian: factor of the deviation")
    concentration: float = Field(1.0, gt=0, description="dirichlet: its parameter")
    sharpness: float = Field(0.5, gt=0, le=1, description="temperature; the ensemble's probabilities have power 1/T")
    server_epochs: int = Field(20, ge=0, description="passes of the server over the public set")
    server_lr: float = Field(1e-3, ge=0, description="rate of the server's training")
    server_batch: int = Field(128, ge=1, description="public items per step")
    swa_start: float = Field(0.33, ge=0, le=1, description="share of the steps before weights are averaged; 1: never")
    swa_every: int = Field(25, ge=1, description="steps between two averaged weights")

    @model_validator(mode="after")
    def _used(self) -> "FedBESettings":
        """Raise CoterieError for a setting of the other distribution."""
        gaussian = self.draw == "gaussian"
        spread = ("spread", gaussian, "draw = gaussian")
        refuse_idle(self, "FedBE", {}, spread, ("concentration", not gaussian, "draw = dirichlet"))
        return self


class FedBE(Method):
    Settings = FedBESettings
    hp: FedBESettings
    card = Card(
        "FedBE",
        "Chen and Chao, ICLR 2021, arXiv 2009.01974",
        2021,
        "G",
        certainty="A",
        compute="as FedAvg; the server trains on the public set",
    )
    needs = ("public", "classes")

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        trees = [u.tree for u in uploads]
        mean = T.mean(trees, self.weights(uploads))
        rest = T.drop(self.ctx.w0, mean.__contains__)  # local batch-norm statistics, if the run keeps them
        teachers = [mean, *self.drawn(server["w"], mean, trees, round), *trees]
        targets = self.ensemble([{**rest, **t} for t in teachers])
        student = self.taught(T.clone({**rest, **mean}), targets, round)
        return {**server, "w": {k: student[k] for k in mean} if T.finite(student) else mean}

    def drawn(self, start: Tree, mean: Tree, trees: Sequence[Tree], round: int) -> list[Tree]:
        """Return models drawn from the distribution fitted to the participants' models."""
        rng, out = self.ctx.rng("teachers", round), []
        names = [k for k in mean if k in self.ctx.net.trainable]
        moves = {k: torch.stack([t[k] - start[k] for t in trees]) for k in names}  # [participants, ...]
        for _ in range(self.hp.models):
            if self.hp.draw == "dirichlet":
                share = torch._standard_gamma(torch.full((len(trees),), self.hp.concentration), generator=rng)
                one = {k: torch.tensordot(share / share.sum(), v, 1) for k, v in moves.items()}
            else:
                one = {k: direction(v, self.hp.spread, rng) for k, v in moves.items()}
            out.append({**mean, **T.add({k: start[k] for k in names}, one)})
        return out

    def ensemble(self, teachers: Sequence[Tree]) -> Tensor:
        """Return the sharpened mean probabilities of all teachers on the public set [public, classes]."""
        assert self.ctx.public_items is not None
        p = torch.stack([self.ctx.outputs(t, self.ctx.public_items).softmax(1) for t in teachers]).mean(0)
        p = (p ** (1 / self.hp.sharpness)).clamp(min=LEAST_SHARPENED)
        return p / p.sum(1, keepdim=True)

    def taught(self, student: Tree, targets: Tensor, round: int) -> Tree:
        """Return the student after training on the targets."""
        assert self.ctx.public_items is not None
        names = [k for k in student if k in self.ctx.net.trainable]
        speed = {k: torch.zeros_like(student[k]) for k in names}
        kept: list[Tree] = []
        steps, total = 0, self.hp.server_epochs * math.ceil(len(targets) / self.hp.server_batch)
        with self.ctx.net.train_mode():
            for epoch in range(self.hp.server_epochs):
                order = torch.randperm(len(targets), generator=self.ctx.rng("server", round, epoch))
                for part in torch.split(order, self.hp.server_batch):
                    x, p = self.ctx.public_items[part], targets[part]
                    slope = grad(lambda w, x=x, p=p: self.gap(w, x, p), student, names)  # type: ignore[misc]
                    for k in names:
                        speed[k] = STUDENT_MOMENTUM * speed[k] + slope[k] + STUDENT_DECAY * student[k]
                        student[k] = student[k] - self.hp.server_lr * speed[k]
                    steps += 1
                    if steps > self.hp.swa_start * total and steps % self.hp.swa_every == 0:
                        kept.append({k: student[k] for k in names})
        return {**student, **(T.mean(kept) if kept else {})}

    def gap(self, params: Tree, x: Tensor, p: Tensor) -> Tensor:
        """Return the divergence of the student's probabilities from p, as a mean over items and classes."""
        return (p * (p.log() - self.ctx.forward(params, x).log_softmax(1))).mean()


def direction(moves: Tensor, spread: float, rng: torch.Generator) -> Tensor:
    """Draw an update from updates [n, ...]: a Gaussian over their directions, times their mean length."""
    rows = moves.reshape(len(moves), -1)
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    way = rows / length.clamp(min=torch.finfo(rows.dtype).tiny)
    mean = way.mean(0)
    deviation = (way.square().mean(0) - mean.square()).clamp(min=DIRECTION_VARIANCE).sqrt()
    noise = torch.randn(mean.shape, generator=rng)
    drawn: Tensor = length.mean() * (mean + spread * deviation * noise)
    return drawn.view(moves.shape[1:])
