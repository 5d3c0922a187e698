"""Ditto. Li, Hu, Beirami, Smith, ICML 2021 (arXiv 2012.04221).

Beside the usual FedAvg training each client keeps a model v_i of its own, trained on its loss plus
lambda/2 ||v - w_t||^2, where w_t is the model received. The two trainings see the same batches; the order between
them does not matter. The mean is uniform, as the authors'. They draw participants in proportion to their samples, so
that the mean is by samples in expectation: `draw = samples` does so and costs an opening round, in which the server
learns the counts. Default is the draw of all other methods, so that a comparison has the same participants.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.method import (
    Batch,
    Card,
    ClientData,
    ClientId,
    Download,
    Extras,
    Method,
    Moment,
    Phase,
    Settings,
    State,
    Tree,
    Upload,
)
from coterie.core.schema import Link, Schema


class DittoSettings(Settings):
    lam: float = Field(1.0, ge=0, description="strength of the pull of the personal model towards the received one")
    personal_epochs: float | None = Field(None, ge=0, description="epochs of the personal model; empty: as the global")
    draw: Literal["uniform", "samples"] = Field(
        "uniform", description="sample participants uniformly, or in proportion to their samples"
    )


class Ditto(Method):
    Settings = DittoSettings
    hp: DittoSettings
    card = Card("Ditto", "Li et al., ICML 2021, arXiv 2012.04221", 2021, "R", personal="a second model")
    weighting = "uniform"

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model both ways; nothing in the opening round."""
        if not self.opening():
            return self.model_schema
        return self.model_schema.optional() if now is None else Schema({}) if now.round == 0 else self.model_schema

    def setup(self) -> State:
        return {**super().setup(), "samples": {}} if self.opening() else super().setup()

    def opening(self) -> bool:
        return self.hp.draw == "samples"

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        """Without replacement, each draw in proportion to the samples of those who are left."""
        if not self.opening() or round == 0:
            return super().sample(server, round, rng)
        counts = torch.tensor([server["samples"].get(i, 0) for i in self.ctx.clients], dtype=torch.float64)
        if not bool(counts.any()):
            return super().sample(server, round, rng)
        m = min(max(1, int(self.ctx.join * len(counts) + 0.5)), int((counts > 0).sum()))
        return sorted(self.ctx.clients[i] for i in torch.multinomial(counts, m, generator=rng).tolist())

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return Download() if round == 0 else super().down(server, ids, round)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if round == 0:
            return {**server, "samples": {u.sender: u.samples for u in uploads}}
        return super().aggregate(server, uploads, round)

    def init_client(self, data: ClientData) -> State:
        return {**super().init_client(data), "v": T.clone(self.ctx.w0)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        if round == 0:
            return {}, {"idle": True}
        received, _ = super().begin(state, download, data, round)
        return {**T.prefix("g:", received), **T.prefix("p:", state["v"])}, {"anchor": received}

    def phases(self, round: int) -> list[Phase]:
        return [
            Phase(self._global_loss, lambda name: name.startswith("g:")),
            Phase(self._personal_loss, lambda name: name.startswith("p:"), self.hp.personal_epochs),
        ]

    def _global_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.loss(T.strip("g:", params), batch)

    def _personal_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        v = T.strip("p:", params)
        loss = self.ctx.loss(v, batch)
        if self.hp.lam == 0:
            return loss
        return loss + self.hp.lam / 2 * T.sqdist(v, extras["anchor"], self.ctx.net.trainable)

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        if round == 0:
            return state, Upload({})
        state, upload = super().end(state, T.strip("g:", params), extras, data, round)
        return {**state, "v": T.strip("p:", params)}, upload

    def received_model(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        return super().personal(state, download, data)

    def trained(self, state: State, params: Tree, extras: Extras) -> tuple[Tree, Extras]:
        return state["v"], {}

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return state["v"], {}

    def newcomer(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return super().personal(state, download, data)  # the global model
