"""pFedMe. Dinh, Tran, Nguyen, NeurIPS 2020 (arXiv 2006.08848).

Each client has a personal model theta, the minimiser of its loss plus lambda/2 ||theta - w_i||^2, found by a few inner
steps per batch; w_i then moves towards theta, and the server averages the w_i.
The run's lr is eta, the step of w_i. Only participants train. Theta has no weight decay (1e-3 in the authors' code).
Batch-norm statistics are not part of the proximal problem: those of w_i are theta's.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Client, Method, Model, Phase, Settings, Start, Trained, Upload
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.errors import CoterieError
from coterie.parts.cluster_models import interpolated
from coterie.parts.gradient import grad


class PFedMeSettings(Settings):
    lam: float = Field(15.0, ge=0, description="strength of the pull between the personal model and w")
    inner_steps: int = Field(5, ge=1, description="steps on theta per batch (K)")
    personal_lr: float = Field(0.05, gt=0, description="rate of the inner steps")
    eta: float | None = Field(None, gt=0, description="step of w towards theta is eta * lam; empty: the run's lr")
    steps: int | None = Field(20, ge=1, description="batches per round (R); empty: the run's epochs")
    beta: float = Field(1.0, ge=0, le=2, description="step of the server towards the mean")


class PFedMe(Method):
    combines = "mean"
    Settings = PFedMeSettings
    hp: PFedMeSettings
    card = Card("pFedMe", "Dinh et al., NeurIPS 2020, arXiv 2006.08848", 2020, "R", personal="a second model")

    def check(self) -> None:
        for name, rate in (("personal_lr", self.hp.personal_lr), ("eta", self.hp.eta or self.ctx.lr)):
            if rate * self.hp.lam >= 2:
                raise CoterieError(
                    f"{self.card.title}: {name} * lam = {rate * self.hp.lam:g} is 2 or more, so training diverges; "
                    f"lower lam, {name} or lr"
                )

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        w = super().begin(state, download, data, round).params
        eta = self.ctx.lr_at(round) if self.hp.eta is None else self.hp.eta
        return Start({**T.tag("w", w), **T.tag("t", w)}, {"step": eta * self.hp.lam})

    def phases(self, round: int) -> list[Phase]:
        return [Phase(update=self.update, steps=self.hp.steps)]

    def update(self, params: Tree, batch: Batch, extras: Extras, rng: torch.Generator) -> Tree:
        """Take K inner steps on theta, then one step of w towards it."""
        w, theta = T.tagged("w", params), T.tagged("t", params)
        names = [k for k in w if k in self.ctx.net.trainable]
        lr, anchor = self.hp.personal_lr, [w[k] for k in names]
        for _ in range(self.hp.inner_steps):
            gradient = grad(lambda p: self.loss(p, batch, extras), theta, names)
            moved = torch._foreach_lerp([theta[k] for k in names], anchor, lr * self.hp.lam)
            torch._foreach_add_(moved, [gradient[k] for k in names], alpha=-lr)
            theta = {**theta, **dict(zip(names, moved, strict=True))}
        w = {**w, **interpolated(T.keep(w, names.__contains__), theta, extras["step"])}
        return {**T.tag("w", w), **T.tag("t", theta)}

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        theta = T.tagged("t", trained.params)
        w = {**T.tagged("w", trained.params), **T.clone(T.keep(theta, self.ctx.group("bn_stats").__contains__))}
        state, upload = super().end(state, replace(trained, params=w), data, round)
        return {**state, "theta": theta}, upload

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        mean = T.mean([u.tree for u in uploads], self.weights(uploads))
        return {**server, "w": interpolated(server["w"], mean, self.hp.beta)}

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "received":
            return super().personal(client.state, client.download, client.data)
        return super().model(view, client)

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        """Return theta; clients that never trained have the received model."""
        return Model(state["theta"]) if "theta" in state else super().personal(state, download, data)
