"""APFL. Deng, Kamani, Mahdavi, arXiv 2003.13461, 2020.

Each client keeps a second model v_i and a weight alpha_i, and uses the mixture of v_i and the global model. The global
model is trained as in FedAvg; v_i is trained through the mixture with the global part fixed; alpha_i follows the
gradient too. Outputs are mixed, as in the authors' code; the paper's text mixes parameters.

`rule = paper` (default): both models step from the same point, as the paper's two gradients at (w, v), and alpha takes
its one step of a round on the first batch by the gradient of the loss, before the models move, with batch norm at its
running values. The mean is by samples, and the mixture with the received model is scored.
`rule = code`: the authors' code. For every batch w steps first and v then, through the mixture with the new w;
after that, on the first batch of a round, alpha steps by <v - w, alpha g_v + (1 - alpha) g_w>, with v and w as they now
are and both gradients of the mixture's loss from before v's step; the mean is uniform; the scored model is the mixture
with the client's own w as its last training left it. Steps are plain SGD at the run's rate: its momentum, weight decay
and Adam are not used. This gradient counts alpha twice, so the paper's rule is the default.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Client, Method, Model, Phase, Settings, Start, Trained, Upload
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts.gradient import grad

ALPHA = "a:alpha"


class APFLSettings(Settings):
    alpha: float = Field(
        0.5, ge=0, le=1, description="fraction of the client's own model (its first value if adaptive)"
    )
    adaptive: bool = Field(True, description="learn alpha, one step per round")
    decay: float = Field(0.02, ge=0, description="pull of alpha towards 0 in its step")
    rule: Literal["paper", "code"] = Field(
        "paper",
        description="order of steps, alpha's gradient, mean and scored model: the text's or the authors' code's",
    )


class APFL(Method):
    Settings = APFLSettings
    hp: APFLSettings
    card = Card("APFL", "Deng et al., arXiv 2003.13461, 2020", 2020, "M", personal="a second model and its weight")

    def init_client(self, data: ClientData) -> State:
        return {**super().init_client(data), "v": T.clone(self.ctx.w0), "alpha": torch.tensor(self.hp.alpha)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        w = super().begin(state, download, data, round).params
        both = {**T.tag("g", w), **T.tag("p", state["v"]), ALPHA: state["alpha"]}
        return Start(both, {"lr": self.ctx.lr_at(round)})

    def phases(self, round: int) -> list[Phase]:
        if self.hp.rule == "code":
            return [Phase(update=self.in_turn)]
        train = Phase(self.loss, lambda k: k != ALPHA)
        return [Phase(update=self.weigh, steps=1), train] if self.hp.adaptive else [train]

    # ---- the paper's rule ----------------------------------------------------------------------------------------
    def weigh(self, params: Tree, batch: Batch, extras: Extras, rng: torch.Generator) -> Tree:
        """Return the new alpha: alpha - lr (d loss / d alpha + decay alpha), clipped to [0, 1]."""
        with torch.no_grad():
            v, w = self._outputs(params, batch.x)
        alpha = params[ALPHA].detach().clone().requires_grad_()
        gradient = torch.autograd.grad(self.ctx.loss_of(alpha * v + (1 - alpha) * w, batch), alpha)[0]
        return {**params, ALPHA: self._stepped(alpha.detach(), gradient, extras)}

    def _stepped(self, alpha: Tensor, gradient: Tensor, extras: Extras) -> Tensor:
        lr: float = extras["lr"]
        return (alpha - lr * (gradient + self.hp.decay * alpha)).clamp(0, 1)

    def _outputs(self, params: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.ctx.forward(T.tagged("p", params), x), self.ctx.forward(T.tagged("g", params), x)

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return the sum of two losses: w learns from its own loss only, v from the loss of the mixture only."""
        w = self.ctx.forward(T.tagged("g", params), batch.x)
        if self.hp.alpha == 0 and not self.hp.adaptive:
            return self.ctx.loss_of(w, batch)  # v contributes nothing: it and its batch norm are not updated
        v, alpha = self.ctx.forward(T.tagged("p", params), batch.x), params[ALPHA]
        return self.ctx.loss_of(w, batch) + self.ctx.loss_of(alpha * v + (1 - alpha) * w.detach(), batch)

    # ---- the rule of the authors' code -----------------------------------------------------------------------------
    def in_turn(self, params: Tree, batch: Batch, extras: Extras, rng: torch.Generator) -> Tree:
        """Step w, then v through the mixture with the new w, and on the first batch alpha."""
        plain = [k for k in T.tagged("g", params) if k in self.ctx.net.trainable]
        ws, vs = [f"g:{k}" for k in plain], [f"p:{k}" for k in plain]
        alpha, lr = params[ALPHA], extras["lr"]
        slope = grad(lambda p: self.ctx.loss(T.tagged("g", p), batch), params, ws)
        params = {**params, **T.add({k: params[k] for k in ws}, slope, -lr)}
        both = grad(lambda p: self.ctx.loss_of(self._mixed(p, batch.x), batch), params, [*vs, *ws])
        params = {**params, **T.add({k: params[k] for k in vs}, both, -lr)}
        if self.hp.adaptive and not extras.get("weighed"):
            extras["weighed"] = True
            apart = T.flatten(params, vs) - T.flatten(params, ws)
            gradient = apart.dot(alpha * T.flatten(both, vs) + (1 - alpha) * T.flatten(both, ws))
            params = {**params, ALPHA: self._stepped(alpha, gradient, extras)}
        return params

    def _mixed(self, params: Tree, x: Tensor) -> Tensor:
        v, w = self._outputs(params, x)
        return params[ALPHA] * v + (1 - params[ALPHA]) * w

    # ---- both ----------------------------------------------------------------------------------------------------
    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        w, alpha = T.tagged("g", trained.params), trained.params[ALPHA]
        state, upload = super().end(state, replace(trained, params=w), data, round)
        new = {**state, "v": T.tagged("p", trained.params), "alpha": alpha}
        return (new if self.hp.rule == "paper" else {**new, "w": w}), Upload(upload.tree, {"alpha": float(alpha)})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        uniform = self.hp.rule == "code" and self.ctx.weighting is None
        return {**server, "w": T.mean([u.tree for u in uploads], None if uniform else self.weights(uploads))}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return self.begin(state, {**download, **state.get("w", {})}, data, 1).model

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "trained" and client.trained is not None:
            return Model(client.trained.params, client.trained.extras)
        if view == "newcomer":  # both models are the global one
            v = super().personal(client.state, client.download, client.data).params
            client = client._replace(state={**client.state, "v": v})
        return super().model(view, client)

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        return self._mixed(params, x)
