"""IFCA, iterative federated clustering. Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020 (arXiv 2006.04088).

The server holds G models with different starts and sends them all; a client picks the one with the lowest loss on its
training data and trains it. Each model becomes the mean of those who picked it; one that nobody picked stays.
Model averaging, without the paper's weight sharing. The first model is the run's own start, the others fresh draws.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field

from coterie.core import tree as T
from coterie.core.method import (
    Card,
    ClientData,
    ClientId,
    Download,
    Extras,
    Method,
    Moment,
    Settings,
    State,
    Tree,
    Upload,
)
from coterie.core.schema import Entry, Link, Schema
from coterie.parts.initial_models import starts

PICKED = "x:picked"
CHUNK = 256  # samples per forward pass when the models are compared


class IFCASettings(Settings):
    groups: int = Field(3, ge=1, description="number of models G")


class IFCA(Method):
    Settings = IFCASettings
    hp: IFCASettings
    card = Card(
        "IFCA", "Ghosh et al., NeurIPS 2020, arXiv 2006.04088", 2020, "C", personal="the best of the clusters' models"
    )
    weighting = "uniform"

    def check(self) -> None:
        starts(self.ctx, min(2, self.hp.groups))

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Up goes the trained model with the number of the one picked, down go all G models."""
        model = self.model_schema.entries
        if link == "down":
            return Schema({f"{g}:{k}": e for g in range(self.hp.groups) for k, e in model.items()})
        return Schema({**model, PICKED: Entry((), torch.int32, "control", low=0, high=self.hp.groups - 1)})

    def setup(self) -> State:
        models = [T.drop(m, self.stays) for m in starts(self.ctx, self.hp.groups)]
        return {"models": models, "picked": [0] * self.hp.groups, "trained": []}

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return Download({f"{g}:{k}": v for g, model in enumerate(server["models"]) for k, v in model.items()})

    def deliver(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """Newcomers choose among models that somebody has trained; the mean of these stands for the others."""
        sent, trained = self.down(server, ids, round), server["trained"]
        new = [i for i in ids if i not in self.ctx.clients]
        if not new or not 0 < len(trained) < self.hp.groups:
            return sent
        mean = T.mean([server["models"][g] for g in trained])
        instead = {f"{g}:{k}": v for g in range(self.hp.groups) if g not in trained for k, v in mean.items()}
        return Download(sent.shared, dict.fromkeys(new, instead))

    def pick(self, models: Sequence[Tree], data: ClientData) -> int:
        """The model with the lowest loss on the training part; ties to the lower number."""
        return int(torch.tensor([self._train_loss(m, data) for m in models]).argmin())

    @torch.no_grad()
    def _train_loss(self, model: Tree, data: ClientData) -> float:
        parts = zip(torch.split(data.train.x, CHUNK), torch.split(data.train.y, CHUNK), strict=True)
        losses = [self.ctx.task.total(self.ctx.forward(model, x), y).double() for x, y in parts]
        return float(torch.stack(losses).sum())

    def _best(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, int]:
        own = state.get("own", {})
        models = [{**T.strip(f"{g}:", download), **own} for g in range(self.hp.groups)]
        best = self.pick(models, data) if len(models) > 1 else 0
        return models[best], best

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        params, best = self._best(state, download, data)
        return params, {"picked": best}

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, params, extras, data, round)
        return state, Upload({**upload.tree, PICKED: torch.tensor(extras["picked"], dtype=torch.int32)})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        models, picked = list(server["models"]), [int(u.tree[PICKED]) for u in uploads]
        for g in set(picked):
            members = [u for u, p in zip(uploads, picked, strict=True) if p == g]
            trees = [T.drop(u.tree, lambda name: name == PICKED) for u in members]
            models[g] = T.mean(trees, self.weights(members))
        cluster = {**server.get("cluster", {}), **{u.sender: p for u, p in zip(uploads, picked, strict=True)}}
        counts = [picked.count(g) for g in range(self.hp.groups)]
        trained = sorted({*server["trained"], *picked})
        return {"models": models, "picked": counts, "cluster": cluster, "trained": trained}

    def global_model(self, server: State) -> None:
        return None

    def cluster_of(self, server: State) -> dict[ClientId, int]:
        """Of those that took part, the model they picked last."""
        return dict(server.get("cluster", {}))

    def cluster_model(self, state: State, download: Tree, data: ClientData) -> Tree | None:
        return self._best(state, download, data)[0] if "own" not in state else None

    def facts(self, server: State) -> dict[str, Any]:
        return {"picked": server["picked"]}

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return self._best(state, download, data)[0], {}
