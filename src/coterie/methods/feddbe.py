"""FedDBE. Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, NeurIPS 2023 (arXiv 2311.14975).

The bias of a client's domain is kept out of the shared features: a vector of the client's own is added to them before
the head, and their mean is drawn to the mean over all clients, kappa/2 |mean of the batch - mean of all|^2 / dim. That
mean is computed once, in round 0, in which every client trains a copy for a round and sends its mean feature.
Means of round 0 come from one clean pass over the training part; the authors take them from the last training
batches. The mean of a batch is not smoothed over batches (the authors' momentum 1, which they use on Fashion-MNIST).
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Download, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree

MEAN = "x:mean"
BIAS = "p:bias"


class FedDBESettings(Settings):
    kappa: float = Field(
        50.0, ge=0, description="strength of the pull of mean features towards the mean of all clients"
    )


class FedDBE(Method):
    Settings = FedDBESettings
    hp: FedDBESettings
    card = Card(
        "FedDBE",
        "Zhang et al., NeurIPS 2023, arXiv 2311.14975",
        2023,
        "S,R",
        personal="a vector added to the features",
        compute="as FedAvg; once, a round 0 in which every client trains",
    )
    needs = ("head",)

    def private(self, name: str) -> bool:
        return name == BIAS

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Round 0 uploads the mean feature; later the model travels both ways, with the mean of all (NaN: unknown)."""
        mean = Schema({MEAN: Entry((self.ctx.net.width,), kind="statistic", part="mean features", nan=link == "down")})
        if now is None:
            return self.model_schema.optional() | mean.optional()
        if now.round == 0:
            return mean if link == "up" else Schema({})
        return self.model_schema | mean if link == "down" else self.model_schema

    def setup(self) -> State:
        return {**super().setup(), "mean": torch.full((self.ctx.net.width,), torch.nan)}

    def opening(self) -> bool:
        return True

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        return Download(shared={**server["w"], MEAN: server["mean"]} if round else {})

    def init_client(self, data: ClientData) -> State:
        return {"own": {**super().init_client(data).get("own", {}), BIAS: torch.zeros(self.ctx.net.width)}}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        if not download:  # round 0: all clients have the initial model
            return Start({**self.ctx.w0, **state["own"]})
        mean = download[MEAN]
        known = float(not bool(mean.isnan().any()))
        params = {**T.drop(download, MEAN.__eq__), **state["own"]}
        return Start(params, {"mean": mean.nan_to_num(), "kappa": known * self.hp.kappa})

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss if round else self.first_loss)]

    def first_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.loss(params, batch)

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        z = self.ctx.features(params, batch.x)
        loss = self.ctx.loss_of(self.ctx.logits(params, z + params[BIAS]), batch)
        w = torch.ones_like(z[:, 0]) if batch.weight is None else batch.weight
        mean = w @ z / w.sum().clamp(min=1)
        kappa: Tensor = extras["kappa"]
        pull: Tensor = (mean - extras["mean"]).square().mean()
        return loss + kappa / 2 * pull

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        if round:
            own = T.keep(trained.params, lambda k: self.stays(k) or k == BIAS)
            return {**state, "own": own}, Upload({k: v for k, v in trained.params.items() if k not in own})
        total = torch.zeros(self.ctx.net.width, dtype=torch.float64, device=self.ctx.device)
        for x in torch.split(data.train.x, 512):
            total += self.ctx.features(trained.params, x).double().sum(0)
        return state, Upload({MEAN: (total / max(len(data.train), 1)).float()})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if round:
            return {**server, **super().aggregate(server, uploads, round)}
        return {**server, "mean": T.mean([u.tree for u in uploads], self.weights(uploads))[MEAN]}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(self.begin(state, download, data, 1).params)

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        return self.ctx.logits(params, self.ctx.features(params, x) + params[BIAS])
