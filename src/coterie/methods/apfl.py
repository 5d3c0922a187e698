"""APFL. Deng, Kamani, Mahdavi, arXiv 2003.13461, 2020.

Each client keeps a second model v_i and a weight alpha_i, and uses the mixture of v_i and the global model. The global
model is trained as in FedAvg; v_i is trained through the mixture with the global part fixed; alpha_i follows the
gradient too. As in the authors' code outputs are mixed, not parameters (the paper's text).
alpha takes its one step of a round on the first batch, before the models move, with batch norm at its running values.
"""

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree as T
from coterie.method import Batch, Card, ClientData, Extras, Method, Phase, Settings, State, Tree, Upload, cross_entropy

ALPHA = "a:alpha"


class APFLSettings(Settings):
    alpha: float = Field(0.5, ge=0, le=1, description="share of the client's own model (its first value if adaptive)")
    adaptive: bool = Field(True, description="learn alpha, one step per round")
    decay: float = Field(0.02, ge=0, description="pull of alpha towards 0 in its step")


class APFL(Method):
    Settings = APFLSettings
    hp: APFLSettings
    card = Card("APFL", "Deng et al., arXiv 2003.13461, 2020", 2020, "M", personal="a second model and its weight")

    def init_client(self, data: ClientData) -> State:
        return {**super().init_client(data), "v": T.clone(self.ctx.w0), "alpha": torch.tensor(self.hp.alpha)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        w, _ = super().begin(state, download, data, round)
        both = {**T.prefix("g:", w), **T.prefix("p:", state["v"]), ALPHA: state["alpha"]}
        return both, {"lr": self.ctx.lr_at(round)}

    def phases(self, round: int) -> list[Phase]:
        train = Phase(self.loss, lambda k: k != ALPHA)
        return [Phase(update=self.weigh, steps=1), train] if self.hp.adaptive else [train]

    def weigh(self, params: Tree, batch: Batch, extras: Extras, rng: torch.Generator) -> Tree:
        """alpha - lr (d loss / d alpha + decay alpha), kept in [0, 1]."""
        with torch.no_grad():
            v, w = self._outputs(params, batch.x)
        alpha = params[ALPHA].detach().clone().requires_grad_()
        gradient = torch.autograd.grad(cross_entropy(alpha * v + (1 - alpha) * w, batch), alpha)[0]
        new = alpha.detach() - extras["lr"] * (gradient + self.hp.decay * alpha.detach())
        return {**params, ALPHA: new.clamp(0, 1)}

    def _outputs(self, params: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.ctx.forward(T.strip("p:", params), x), self.ctx.forward(T.strip("g:", params), x)

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """w learns from its own loss only, v from that of the mixture only."""
        w = self.ctx.forward(T.strip("g:", params), batch.x)
        if self.hp.alpha == 0 and not self.hp.adaptive:
            return cross_entropy(w, batch)  # v has no part in anything: it and its batch norm stand still
        v, alpha = self.ctx.forward(T.strip("p:", params), batch.x), params[ALPHA]
        return cross_entropy(w, batch) + cross_entropy(alpha * v + (1 - alpha) * w.detach(), batch)

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, T.strip("g:", params), extras, data, round)
        new = {**state, "v": T.strip("p:", params), "alpha": params[ALPHA]}
        return new, Upload(upload.tree, {"alpha": float(params[ALPHA])})

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return self.begin(state, download, data, 1)

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        v, w = self._outputs(params, x)
        return params[ALPHA] * v + (1 - params[ALPHA]) * w
