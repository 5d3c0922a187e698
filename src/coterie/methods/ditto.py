"""Ditto. Li, Hu, Beirami, Smith, ICML 2021 (arXiv 2012.04221).

Clients train the global model as in FedAvg. Each client also keeps a model v_i of its own, trained on its loss plus
lambda/2 ||v - w_t||^2, where w_t is the model received. The two trainings see the same batches; their order does not
matter. The mean is uniform, as in the authors' code. The authors sample participants in proportion to their samples, so
that the mean is by samples in expectation: `draw = samples` does so and costs an opening round, in which the server
learns the counts. The default samples as all other methods do, so that a comparison has the same participants.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import (
    Card,
    Client,
    Model,
    Phase,
    Settings,
    Start,
    TaskLoss,
    Trained,
    Upload,
    unless_overridden,
)
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts.size_sampling import SampledBySize


class DittoSettings(Settings):
    lam: float = Field(1.0, ge=0, description="strength of the pull of the personal model towards the received one")
    personal_epochs: float | None = Field(None, ge=0, description="epochs of the personal model; empty: as the global")
    draw: Literal["uniform", "samples"] = Field(
        "uniform", description="sample participants uniformly, or in proportion to their samples"
    )


class Ditto(SampledBySize):
    Settings = DittoSettings
    hp: DittoSettings
    card = Card("Ditto", "Li et al., ICML 2021, arXiv 2012.04221", 2021, "R", personal="a second model")
    weighting = "uniform"

    def init_client(self, data: ClientData) -> State:
        return {**super().init_client(data), "v": T.clone(self.ctx.w0)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        both = {**T.tag("g", start.params), **T.tag("p", state["v"])}
        return replace(start, params=both, extras={"anchor": start.params})

    def phases(self, round: int) -> list[Phase]:
        loss = unless_overridden(self, Ditto, "loss", self._of_global)
        own = unless_overridden(self, Ditto, "personal_loss", self._of_personal)
        return [Phase(loss, T.has_tag("g")), Phase(own, T.has_tag("p"), self.hp.personal_epochs)]

    @property
    def _of_global(self) -> TaskLoss:
        return TaskLoss(self.ctx, "g")

    @property
    def _of_personal(self) -> TaskLoss:
        return TaskLoss(self.ctx, "p", pull=self.hp.lam)

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self._of_global(params, batch, extras)

    def personal_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return the loss of the personal model, with the pull towards the received one."""
        return self._of_personal(params, batch, extras)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        shared = replace(trained, params=T.tagged("g", trained.params))
        state, upload = super().end(state, shared, data, round)
        return {**state, "v": T.tagged("p", trained.params)}, upload

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["v"])

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view in ("newcomer", "received"):
            return super().personal(client.state, client.download, client.data)  # the global model
        return super().model(view, client)
