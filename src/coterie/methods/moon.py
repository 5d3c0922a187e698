"""MOON. Li, He, Song, CVPR 2021 (arXiv 2103.16257).

FedAvg with a contrastive term: the features of a sample are drawn towards those of the model received and pushed from
those of the client's model after its last local training, -log(e^a / (e^a + e^b)) with cosines a, b over tau.
Features are the inputs of the head; the authors add a projection of two layers to their models. The two reference
models are not updated, and their batch norm uses its running statistics. A client that has never trained uses the
initial model as its last one, so the first round is FedAvg.
"""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Method, Settings, Start, Trained, Upload
from coterie.core.tree import Tree
from coterie.parts.distill import batch_mean


class MoonSettings(Settings):
    mu: float = Field(5.0, ge=0, description="strength of the contrastive term")
    tau: float = Field(0.5, gt=0, description="temperature of the cosines")


class Moon(Method):
    Settings = MoonSettings
    hp: MoonSettings
    card = Card(
        "MOON",
        "Li et al., CVPR 2021, arXiv 2103.16257",
        2021,
        "G,R",
        personal="its last local model, not used to predict",
        certainty="A",
        compute="two further forward passes per batch",
    )
    needs = ("head",)

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params = super().begin(state, download, data, round).params
        return Start(params, {"received": T.clone(params), "last": state.get("last", self.ctx.w0)})

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        towards, away = (self.ctx.features(extras[k], batch.x).detach() for k in ("received", "last"))
        logits, z = self.ctx.net.both(params, batch.x)
        loss = self.ctx.loss_of(logits, batch)
        if self.hp.mu == 0:
            return loss
        gap = F.cosine_similarity(z, away) - F.cosine_similarity(z, towards)
        return loss + self.hp.mu * batch_mean(F.softplus(gap / self.hp.tau), batch.weight)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return {**state, "last": trained.params}, upload
