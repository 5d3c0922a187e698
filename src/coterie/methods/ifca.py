"""IFCA, iterative federated clustering. Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020 (arXiv 2006.04088).

The server holds G models with different initial values and sends them all; a client picks the one with the lowest loss
on its training data and trains it. Each model becomes the mean over the clients that picked it; a model without such
clients stays as it is. This is the paper's model averaging, without weight sharing. The first model is the run's
initial model, the others are drawn afresh.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, State
from coterie.core.method import Card, Download, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.parts.cluster_models import SendsAllModels, numbered, sizes

PICKED = "x:picked"


class IFCASettings(Settings):
    groups: int = Field(3, ge=1, le=1000, description="number of models G")


class IFCA(SendsAllModels):
    Settings = IFCASettings
    hp: IFCASettings
    card = Card(
        "IFCA", "Ghosh et al., NeurIPS 2020, arXiv 2006.04088", 2020, "C", personal="the best of the clusters' models"
    )
    weighting = "uniform"

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Uploads hold the trained model and the number of the one picked, downloads all G models."""
        picked = Schema({PICKED: Entry((), torch.int32, "control", low=0, high=self.hp.groups - 1)})
        return super().schema(link, now) if link == "down" else self.model_schema | picked

    def setup(self) -> State:
        return {**super().setup(), "picked": [0] * self.hp.groups, "trained": []}

    def deliver(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """Let newcomers choose among trained models; the mean of these replaces the others."""
        sent, trained = self.down(server, ids, round), server["trained"]
        new = [i for i in ids if i not in self.ctx.clients]
        if not new or not 0 < len(trained) < self.hp.groups:
            return sent
        mean = T.mean([server["models"][g] for g in trained])
        instead = dict.fromkeys((g for g in range(self.hp.groups) if g not in trained), mean)
        return Download(sent.shared, dict.fromkeys(new, numbered(instead)))

    def pick(self, models: Sequence[Tree], data: ClientData) -> int:
        """Return the number of the model with the lowest loss on the training part; the first of equal ones."""
        losses = [float(self.ctx.losses(m, data.train).double().sum()) for m in models]
        return int(torch.tensor(losses).argmin())

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        models = self.received(state, download)
        best = self.pick(models, data) if len(models) > 1 else 0
        return Start(models[best], {"picked": best})

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return state, Upload({**upload.tree, PICKED: torch.tensor(trained.extras["picked"], dtype=torch.int32)})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        picked = {u.sender: int(u.tree[PICKED]) for u in uploads}
        return {
            "models": self.averaged(server["models"], uploads, picked),
            "picked": sizes(picked, self.hp.groups),
            "cluster": {**server["cluster"], **picked},
            "trained": sorted({*server["trained"], *picked.values()}),
        }

    def facts(self, server: State) -> dict[str, Any]:
        return {"picked": server["picked"]}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(self.begin(state, download, data, 0).params)
