"""FedFomo. Zhang, Sapra, Fidler, Yeung, Alvarez, ICLR 2021 (arXiv 2012.08565).

A client receives up to M models of others, weighs each (and its own last one) by how much it lowers the loss on the
client's validation part per distance, both from its model before its last training, and starts from the weighted sum.
Affinities go back to the server, which sends the most helpful models next time and sometimes a random one.
Only models of clients that have answered are sent, so the first rounds carry fewer than M. `val_share` of the
federation (0.2 in the papers) sets the validation part; it is fixed per client and never trained on.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree as T
from coterie.method import (
    Batch,
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
from coterie.parts import bank, pairs
from coterie.schema import Entry, Link, Schema

MODELS, AFFINITY = "models", "x:affinity"
BOUND = 1e6  # of an affinity


class FedFomoSettings(Settings):
    models: int = Field(5, ge=0, description="M: at most so many models of others are sent")
    explore: float = Field(0.3, ge=0, le=1, description="chance of a random model instead of the best, in round 1")
    explore_decay: float = Field(0.05, ge=0, description="by which that chance falls from round to round")


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
        """Down go models of others as rows, up the client's own model and its affinity to each of those rows."""
        size = sum(v.numel() for v in T.floats(T.drop(self.ctx.w0, self.stays)).values())
        count: int | str = "models" if now is None else len(self.sent_to(now.server, now.client, now.round))
        lengths = {"models": (1, max(1, self.hp.models))} if now is None else {}
        if link == "down":
            rows = Schema({MODELS: Entry((count, size))} if count else {}, lengths)
            return rows.optional() if now is None else rows
        affinity = Entry((count,), kind="statistic", low=-BOUND, high=BOUND, optional=now is None)
        return self.model_schema | Schema({AFFINITY: affinity} if count else {}, lengths)

    def setup(self) -> State:
        return pairs.opened(T.drop(self.ctx.w0, self.stays), [])  # similarity: the sum of a client's affinities

    def sent_to(self, server: State, client: ClientId, round: int) -> list[int]:
        """Rows of the bank that the client is sent: by falling affinity, equal ones in random order."""
        ids, rng = server["bank"]["ids"], self.ctx.rng("candidates", round, client)
        shuffled = torch.randperm(len(ids), generator=rng)
        affinity = server["similarity"][ids.index(client)][shuffled] if client in ids else torch.zeros(len(ids))
        by_affinity = shuffled[affinity.sort(descending=True, stable=True).indices]
        best = [r for r in by_affinity.tolist() if ids[r] != client]
        at_random = [r for r in torch.randperm(len(ids), generator=rng).tolist() if ids[r] != client]
        epsilon = max(0.0, self.hp.explore - self.hp.explore_decay * (round - 1))
        picked: list[int] = []
        for draw in torch.rand(min(self.hp.models, len(best)), generator=rng).tolist():
            picked.append(next(r for r in (at_random if draw < epsilon else best) if r not in picked))
        return picked

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        picked = {i: self.sent_to(server, i, round) for i in ids}
        return Download(each={i: {MODELS: server["bank"]["flat"][rows]} for i, rows in picked.items() if rows})

    def deliver(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """Scoring needs no models of others, except after the last round, when one more training is scored too."""
        return self.down(server, ids, round) if round > self.ctx.rounds else Download()

    def init_client(self, data: ClientData) -> State:
        return {"w": T.clone(self.ctx.w0), "old": T.clone(self.ctx.w0)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        own, old = state["w"], state["old"]
        sent = bank.trees(download[MODELS], T.drop(self.ctx.w0, self.stays)) if MODELS in download else []
        candidates = [*({**own, **tree} for tree in sent), own]
        raw = self.affinities(candidates, old, data)
        start = T.mean(candidates, raw.clamp(min=0)) if bool((raw > 0).any()) else own
        return start, {"start": start, "affinity": raw[:-1]}

    def affinities(self, candidates: Sequence[Tree], old: Tree, data: ClientData) -> Tensor:
        """(L(old) - L(candidate)) / |candidate - old|, not clipped [candidates]."""
        with torch.no_grad():
            losses = torch.stack([self.ctx.ce(tree, Batch(*data.val)) for tree in [old, *candidates]])
        far = torch.stack([T.sqdist(tree, old, self.ctx.net.trainable).sqrt() for tree in candidates])
        # bounded, so that a diverged candidate does not spoil the upload
        return ((losses[0] - losses[1:]) / (far + 1e-5)).nan_to_num(-BOUND).clamp(-BOUND, BOUND)

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        new = {AFFINITY: extras["affinity"]} if len(extras["affinity"]) else {}
        return {"w": params, "old": extras["start"]}, Upload({**T.drop(params, self.stays), **new})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        new, rows = pairs.received(server, {u.sender: T.drop(u.tree, lambda k: ":" in k) for u in uploads})
        for row, u in zip(rows.tolist(), uploads, strict=True):
            if AFFINITY in u.tree:  # others keep their rows in the bank, so those they were sent by still hold
                new["similarity"][row, self.sent_to(server, u.sender, round)] += u.tree[AFFINITY]
        return new

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return state["w"], {}
