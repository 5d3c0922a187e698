"""Ditto. Li, Hu, Beirami, Smith, ICML 2021 (arXiv 2012.04221).

Beside the usual FedAvg training each client keeps a model v_i of its own, trained on its loss plus
lambda/2 ||v - w_t||^2, where w_t is the model received. The two trainings see the same batches; the order between
them does not matter.
"""

from pydantic import Field
from torch import Tensor

from coterie import tree as T
from coterie.method import Batch, Card, ClientData, Extras, Method, Phase, Settings, State, Tree, Upload


class DittoSettings(Settings):
    lam: float = Field(1.0, ge=0, description="strength of the pull of the personal model towards the received one")
    personal_epochs: float | None = Field(None, ge=0, description="epochs of the personal model; empty: as the global")


class Ditto(Method):
    Settings = DittoSettings
    hp: DittoSettings
    card = Card("Ditto", "Li et al., ICML 2021, arXiv 2012.04221", 2021, "R", personal="a second model")
    weighting = "uniform"

    def init_client(self, data: ClientData) -> State:
        return {**super().init_client(data), "v": T.clone(self.ctx.w0)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        received, _ = super().begin(state, download, data, round)
        return {**T.prefix("g:", received), **T.prefix("p:", state["v"])}, {"anchor": received}

    def phases(self, round: int) -> list[Phase]:
        return [
            Phase(self._global_loss, lambda name: name.startswith("g:")),
            Phase(self._personal_loss, lambda name: name.startswith("p:"), self.hp.personal_epochs),
        ]

    def _global_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.ce(T.strip("g:", params), batch)

    def _personal_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        v = T.strip("p:", params)
        ce = self.ctx.ce(v, batch)
        if self.hp.lam == 0:
            return ce
        return ce + self.hp.lam / 2 * T.sqdist(v, extras["anchor"], self.ctx.net.trainable)

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, T.strip("g:", params), extras, data, round)
        return {**state, "v": T.strip("p:", params)}, upload

    def trained(self, state: State, params: Tree, extras: Extras) -> tuple[Tree, Extras]:
        return state["v"], {}

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return state["v"], {}
