"""FedSoft. Ruan, Joe-Wong, AAAI 2022 (arXiv 2112.06053).

Soft clusters: a client's data may come from several of S distributions, each with a model c_s. A client's importance
u_s is the share of its samples for which c_s has the lowest loss of all (`smoother` if there is none). It keeps one
model of its own, trained on its loss plus lambda/2 sum_s u_s |w - c_s|^2. For each cluster the server draws
participants in proportion to u_s times their samples, and c_s becomes the mean of their models; if all clients take
part, the mean is weighted by that product instead.
All clients estimate their importance in an opening round and then in every `interval`-th round, in which those that
are not drawn send nothing else. Departures: an estimate decides on the draws of the next round, not of the same one.
The run's participants are divided evenly among the clusters. A client that never trained uses the mean of the clusters'
models by its importance.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, ClientId, Extras, State
from coterie.core.method import Card, Client, Download, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts.cluster_models import SendsAllModels

IMPORTANCE, TRAINS = "x:importance", "x:trains"


class FedSoftSettings(Settings):
    groups: int = Field(2, ge=1, description="S: number of clusters")
    lam: float = Field(0.1, ge=0, description="strength of the pull towards the clusters' models")
    interval: int = Field(2, ge=1, description="all clients estimate their importance in every so many rounds")
    smoother: float = Field(1e-4, gt=0, le=1, description="importance of a cluster that is the best for no sample")


class FedSoft(SendsAllModels):
    Settings = FedSoftSettings
    hp: FedSoftSettings
    card = Card(
        "FedSoft",
        "Ruan and Joe-Wong, AAAI 2022, arXiv 2112.06053",
        2022,
        "C,R",
        personal="the whole model",
        certainty="A",
        compute="S forward passes over the training part in every second round",
    )

    def estimates(self, round: int) -> bool:
        return round % self.hp.interval == 0

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Downloads hold all models; uploads of drawn clients the model, those of an estimate the importance."""
        if link == "down":
            trains = Schema({TRAINS: Entry((), torch.int32, "control", "control", 0, 1, optional=now is None)})
            told = now is None or (now.round > 0 and self.estimates(now.round))
            return super().schema(link, now) | trains if told else super().schema(link, now)
        importance = Schema({IMPORTANCE: Entry((self.hp.groups,), kind="statistic", part="importance", low=0, high=1)})
        if now is None:
            return self.model_schema.optional() | importance.optional()
        drawn = now.round > 0 and any(now.client in ids for ids in self.drawn(now.server, now.round))
        return (self.model_schema if drawn else Schema({})) | (importance if self.estimates(now.round) else Schema({}))

    def opening(self) -> bool:
        return True

    def setup(self) -> State:
        return {**super().setup(), "importance": {}}

    # ---- draws -------------------------------------------------------------------------------------------------------
    def shares(self, server: State) -> Tensor:
        """Return importance times samples [clients, S]; a client that sent none has the mean of the others."""
        known = server["importance"]
        mean = torch.stack(list(known.values())).mean(0) if known else torch.ones(self.hp.groups, dtype=torch.float64)
        return torch.stack([known.get(i, mean) for i in self.ctx.clients])

    def drawn(self, server: State, round: int) -> list[list[ClientId]]:
        """Return the clients drawn for each cluster; all of them if the whole federation takes part."""
        ids, count = self.ctx.clients, self.ctx.participants()
        if count == len(ids):
            return [list(ids)] * self.hp.groups
        rng, each = self.ctx.rng("clusters", round), max(1, int(count / self.hp.groups + 0.5))
        columns = self.shares(server).T.contiguous()
        return [[ids[k] for k in torch.multinomial(v, each, generator=rng).tolist()] for v in columns]

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        if self.estimates(round):
            return list(self.ctx.clients)
        return sorted({i for ids in self.drawn(server, round) for i in ids})

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        models = super().down(server, ids, round).shared
        if round == 0 or not self.estimates(round):
            return Download(models)
        drawn = {i for members in self.drawn(server, round) for i in members}
        return Download(models, {i: {TRAINS: torch.tensor(int(i in drawn), dtype=torch.int32)} for i in ids})

    def deliver(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return super().down(server, ids, round)

    # ---- client ------------------------------------------------------------------------------------------------------
    def importance(self, models: Sequence[Tree], data: ClientData) -> Tensor:
        """Return the share of the samples for which each model has the lowest loss [S]."""
        losses = torch.stack([self.ctx.task.each(self.ctx.outputs(m, data.train.x), data.train.y) for m in models])
        share = torch.bincount(losses.argmin(0), minlength=len(models)).float() / max(len(data.train), 1)
        return torch.where(share == 0, self.hp.smoother, share)

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        models = self.received(state, download)
        u = state["u"] if "u" in state and not self.estimates(round) else self.importance(models, data)
        train = round > 0 and int(download.get(TRAINS, 1)) == 1
        extras = {"u": u, "anchor": T.mean(models, u), "strength": self.hp.lam * float(u.sum()), "trains": train}
        return Start(state.get("model", self.ctx.w0), extras, train)

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        loss = self.ctx.loss(params, batch)
        if self.hp.lam == 0:
            return loss
        pull: Tensor = extras["strength"] / 2 * T.sqdist(params, extras["anchor"], self.ctx.net.trainable)
        return loss + pull

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        u = trained.extras["u"]
        kept, sent = {**state, "u": u}, {IMPORTANCE: u} if self.estimates(round) else {}
        if not trained.extras["trains"]:
            return kept, Upload(sent)
        kept, upload = super().end(kept, trained, data, round)
        return {**kept, "model": trained.params}, Upload({**upload.tree, **sent})

    # ---- server ------------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        models, trees = list(server["models"]), {u.sender: T.untagged(u.tree) for u in uploads}
        shares, complete = self.shares(server), self.ctx.participants() == len(self.ctx.clients)
        for s, members in enumerate(self.drawn(server, round) if round else ()):
            present = sorted(i for i in members if trees.get(i))
            weights = [float(shares[self.ctx.clients.index(i), s]) for i in present] if complete else None
            models[s] = T.mean([trees[i] for i in present], weights) if present else models[s]
        fresh = {u.sender: u.tree[IMPORTANCE].double() * u.samples for u in uploads if IMPORTANCE in u.tree}
        importance = {**server["importance"], **fresh}
        cluster = {i: int(v.argmax()) for i, v in importance.items()}
        return {"models": models, "cluster": cluster, "importance": importance}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["model"] if "model" in state else self.begin(state, download, data, 0).extras["anchor"])

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view != "edge":
            return super().model(view, client)
        start = self.begin(*client[:3], 0)
        return Model(self.received(client.state, client.download)[int(start.extras["u"].argmax())])
