"""FedFomo. Zhang, Sapra, Fidler, Yeung, Alvarez, ICLR 2021 (arXiv 2012.08565).

A client receives up to M models of others, weighs each (and its own last one) by how much it lowers the loss on the
client's validation part per distance, both from its model before its last training, and starts from the weighted sum.
Affinities go back to the server, which sends the most helpful models next time and sometimes a random one.
Only models of clients that have answered are sent, so the first rounds carry fewer than M. `val_share` of the
federation (0.2 in the papers) sets the validation part; it is fixed per client and never trained on.

`reading = paper` (default) is the text. `reading = code` follows the authors' code where it differs: distances are sums
of absolute differences; a client that no candidate helps goes back to its model before its last training; affinities
are divided by the size of their sum before they are added up; only models that were uploaded in the last round are
sent; and averages are candidates as well: one for each of `averages` clusters of clients, found by spectral clustering
of the affinities, over the most recent uploaders in it, and their mean. All clients receive these in addition to the M
models.
The paper's rule is the default, because it needs no number of clusters and never discards a client's own training.
The authors count the chance of a random model by epochs, here it falls from round to round.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from sklearn.cluster import SpectralClustering
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, ClientId, State
from coterie.core.method import Card, Client, Download, Method, Model, Moment, Start, Trained, Upload
from coterie.core.rng import key
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts import model_bank as bank
from coterie.parts import pairwise_state as pairs
from coterie.parts.readings import ReadingSettings

MODELS, AVERAGES, AFFINITY = "models", "averages", "x:affinity"
LARGEST_AFFINITY = 1e6  # largest absolute affinity


class FedFomoSettings(ReadingSettings):
    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "code": {"distance": "l1", "nobody": "baseline", "affinity": "shares", "sent": "last_round", "averages": 5}
    }
    reading: Literal["paper", "code"] = Field("paper", description="the text, or the authors' code")
    models: int = Field(5, ge=0, description="M: largest number of other clients' models that are sent")
    explore: float = Field(0.3, ge=0, le=1, description="chance of a random model instead of the best, in round 1")
    explore_decay: float = Field(0.05, ge=0, description="decrease of that chance per round")
    distance: Literal["l1", "l2"] = Field("l2", description="norm of the difference of two models")
    nobody: Literal["own", "baseline"] = Field(
        "own",
        description="start of a client without a helpful model: its own model, or its model before its last training",
    )
    affinity: Literal["raw", "shares"] = Field(
        "raw", description="what is added up: affinities, or affinities over the size of their sum"
    )
    sent: Literal["answered", "last_round"] = Field(
        "answered", description="whose models are sent: of all that ever answered, or of the last round"
    )
    averages: int = Field(0, ge=0, description="clusters whose averages are candidates too, with their mean; 0: none")


class FedFomo(Method):
    Settings = FedFomoSettings
    hp: FedFomoSettings
    card = Card(
        "FedFomo",
        "Zhang et al., ICLR 2021, arXiv 2012.08565",
        2021,
        "M",
        personal="the whole model, mixed on the client",
    )
    needs = ("val",)

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Downloads hold other clients' models as rows; uploads the client's model and its affinity to each row."""
        size = sum(v.numel() for v in T.floats(T.drop(self.ctx.w0, self.stays)).values())
        count: int | str = "models" if now is None else len(self.sent_to(now.server, now.client, now.round))
        lengths = {"models": (1, max(1, self.hp.models))} if now is None else {}
        if link == "down":
            entries = {MODELS: Entry((count, size))} if count else {}
            if self.hp.averages:
                means: int | str = "averages" if now is None else len(now.server["averages"])
                entries |= {AVERAGES: Entry((means, size))} if means else {}
                lengths |= {"averages": (1, self.hp.averages + 1)} if now is None else {}
            rows = Schema(entries, lengths)
            return rows.optional() if now is None else rows
        affinity = Entry((count,), kind="statistic", low=-LARGEST_AFFINITY, high=LARGEST_AFFINITY, optional=now is None)
        return self.model_schema | Schema({AFFINITY: affinity} if count else {}, lengths)

    def setup(self) -> State:
        opened = pairs.opened(T.drop(self.ctx.w0, self.stays), [])  # similarity: the sum of a client's affinities
        return {**opened, "averages": opened["bank"]["flat"], "last": {}, "samples": {}}

    def _sendable(self, server: State) -> list[int]:
        """Return the rows of the bank whose models may be sent."""
        ids, last = server["bank"]["ids"], server["last"]
        newest = max(last.values(), default=0)
        return [r for r, i in enumerate(ids) if self.hp.sent == "answered" or last[i] == newest]

    def sent_to(self, server: State, client: ClientId, round: int) -> list[int]:
        """Return the rows of the bank that the client is sent: by falling affinity, equal ones in random order."""
        ids, rng = server["bank"]["ids"], self.ctx.rng("candidates", round, client)
        others = {r for r in self._sendable(server) if ids[r] != client}
        shuffled = torch.randperm(len(ids), generator=rng)
        affinity = server["similarity"][ids.index(client)][shuffled] if client in ids else torch.zeros(len(ids))
        by_affinity = shuffled[affinity.sort(descending=True, stable=True).indices]
        best = [r for r in by_affinity.tolist() if r in others]
        at_random = [r for r in torch.randperm(len(ids), generator=rng).tolist() if r in others]
        epsilon = max(0.0, self.hp.explore - self.hp.explore_decay * (round - 1))
        picked: list[int] = []
        for draw in torch.rand(min(self.hp.models, len(best)), generator=rng).tolist():
            picked.append(next(r for r in (at_random if draw < epsilon else best) if r not in picked))
        return picked

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        picked = {i: self.sent_to(server, i, round) for i in ids}
        shared = {AVERAGES: server["averages"]} if len(server["averages"]) else {}
        return Download(shared, {i: {MODELS: server["bank"]["flat"][rows]} for i, rows in picked.items() if rows})

    def deliver(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """Send other clients' models to clients that have never trained, and to all if a view needs the mixture."""
        mixes = round > self.ctx.planned_rounds or self.ctx.headline in ("received", "trained")
        return self.down(server, ids if mixes else [i for i in ids if i not in server["bank"]["ids"]], round)

    def init_client(self, data: ClientData) -> State:
        return {"w": T.clone(self.ctx.w0), "old": T.clone(self.ctx.w0)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        own, old = state["w"], state["old"]
        like = T.drop(self.ctx.w0, self.stays)
        sent = [bank.trees(download[k], like) if k in download else [] for k in (MODELS, AVERAGES)]
        candidates = [*({**own, **tree} for part in sent for tree in part), own]
        raw = self.affinities(candidates, old, data)
        start = own if self.hp.nobody == "own" else old
        if bool((raw > 0).any()):
            start = T.mean(candidates, raw.clamp(min=0))
        reported = raw if self.hp.affinity == "raw" else raw / raw.sum().abs().clamp(min=1e-9)
        return Start(
            start, {"start": start, "affinity": reported[: len(sent[0])].clamp(-LARGEST_AFFINITY, LARGEST_AFFINITY)}
        )

    def affinities(self, candidates: Sequence[Tree], old: Tree, data: ClientData) -> Tensor:
        """(L(old) - L(candidate)) / |candidate - old|, not clipped [candidates]."""
        with torch.no_grad():
            losses = torch.stack([self.ctx.loss(tree, Batch(*data.val)) for tree in [old, *candidates]])
        names = self.ctx.net.trainable
        if self.hp.distance == "l2":
            far = torch.stack([T.sqdist(tree, old, names).sqrt() for tree in candidates])
        else:
            far = torch.stack([(T.flatten(tree, names) - T.flatten(old, names)).abs().sum() for tree in candidates])
        # bounded, so that a diverged candidate does not spoil the upload
        return (
            ((losses[0] - losses[1:]) / (far + 1e-5))
            .nan_to_num(-LARGEST_AFFINITY)
            .clamp(-LARGEST_AFFINITY, LARGEST_AFFINITY)
        )

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        new = {AFFINITY: trained.extras["affinity"]} if len(trained.extras["affinity"]) else {}
        return {"w": trained.params, "old": trained.extras["start"]}, Upload(
            {**T.drop(trained.params, self.stays), **new}
        )

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        new, rows = pairs.received(server, {u.sender: T.untagged(u.tree) for u in uploads})
        for row, u in zip(rows.tolist(), uploads, strict=True):
            if AFFINITY in u.tree:  # rows of the bank never change, so row numbers from earlier rounds are still valid
                new["similarity"][row, self.sent_to(server, u.sender, round)] += u.tree[AFFINITY]
        new["last"] = {**server["last"], **{u.sender: round for u in uploads}}
        new["samples"] = {**server["samples"], **{u.sender: u.samples for u in uploads}}
        return {**new, "averages": self._averages(new)} if self.hp.averages else new

    def _averages(self, server: State) -> Tensor:
        """Return sample-weighted means [clusters + 1, P] over each cluster's most recent uploaders, and their mean."""
        ids, V = server["bank"]["ids"], server["bank"]["flat"]
        rows = []
        for c in sorted(set(labels := self._clusters(server["similarity"]))):
            members = [r for r in range(len(ids)) if labels[r] == c]
            newest = max(server["last"][ids[r]] for r in members)
            recent = [r for r in members if server["last"][ids[r]] == newest]
            share = torch.tensor(T.normalised([float(server["samples"][ids[r]]) for r in recent], len(recent)))
            rows.append(share.to(V) @ V[recent])
        return torch.stack([*rows, torch.stack(rows).mean(0)])

    def _clusters(self, affinity: Tensor) -> list[int]:
        """Return the cluster of each client in the bank, by mutual affinity; one cluster while there are too few."""
        groups = self.hp.averages
        if groups == 1 or len(affinity) <= groups:
            return [0] * len(affinity)
        near = torch.exp(-((1 - affinity) ** 2) / 2)
        clusters = SpectralClustering(
            groups, affinity="precomputed", assign_labels="discretize", random_state=key(self.ctx.seed, "fomo") % 2**32
        ).fit_predict(((near + near.T) / 2).numpy())
        return [int(c) for c in clusters]

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["w"])

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view != "newcomer":
            return super().model(view, client)
        state, download = client.state, client.download
        sent = bank.trees(download[MODELS], T.drop(self.ctx.w0, self.stays)) if MODELS in download else []
        if not sent:
            return Model(state["w"])
        others = [{**state["w"], **tree} for tree in sent]
        raw = self.affinities(others, state["old"], client.data).clamp(min=0)
        return Model(T.mean(others, raw if bool((raw > 0).any()) else None))  # every one of these models was trained
