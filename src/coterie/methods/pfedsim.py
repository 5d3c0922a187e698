"""pFedSim. Tan, Zhou, Liu, Wang, Yu, arXiv 2305.15706, 2023.

A first share rho of the rounds is FedAvg. After it all clients start from that model; a client receives a mixture of
all stored bodies, weighted by -log(1 - s) of the cosines s of the classifiers, and keeps its own head.
Every similarity is capped at 0.9999 (FL-bench caps a client's own only), so that equal heads weigh equally.
A client's head comes down once, in its first round of the second phase; s of a pair is renewed when both answer.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, State
from coterie.core.method import Card, Download, Method, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.parts import model_bank as bank
from coterie.parts import pairwise_state as pairs
from coterie.parts.similarity import cosine_rows, neg_log_weights, normalise_rows


class PFedSimSettings(Settings):
    rho: float = Field(0.5, ge=0, le=1, description="fraction of the rounds that are FedAvg (generalisation phase)")
    score: Literal["own", "mixed"] = Field("own", description="model that is scored: last trained, or the next mixture")


class PFedSim(Method):
    Settings = PFedSimSettings
    hp: PFedSimSettings
    card = Card(
        "pFedSim", "Tan et al., arXiv 2305.15706, 2023", 2023, "M,S", personal="the head, and a mixture of bodies"
    )
    needs = ("head",)
    plans_ahead = True

    def _fedavg_rounds(self) -> int:
        """The number of FedAvg rounds."""
        return int(self.hp.rho * self.ctx.planned_rounds + 0.5)

    def _head(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The whole model; downloads lack the head once a client has answered in the second phase."""
        if link == "up":
            return self.model_schema
        shared = T.drop(self.ctx.w0, self.stays)
        if now is None:
            return Schema(like(T.drop(shared, self._head)) | like(T.keep(shared, self._head), optional=True))
        has_head = now.client in now.server.get("answered", [])
        return Schema(like(T.drop(shared, self._head))) if has_head else self.model_schema

    def setup(self) -> State:
        server = super().setup()
        return server if self._fedavg_rounds() else {**server, **pairs.opened(server["w"], self.ctx.clients)}

    def mixing(self, similarity: Tensor, rows: Tensor) -> Tensor:
        """Return weights [rows, clients] from the similarities s [clients, clients]."""
        return normalise_rows(neg_log_weights(similarity)[rows], torch.zeros(()))

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        if "bank" not in server:
            return Download(shared=server["w"])
        known, V = bank.known(server["bank"], ids), server["bank"]["flat"]
        rows = bank.rows(server["bank"], known)
        mixed = bank.trees(self.mixing(server["similarity"], rows).to(V) @ V, server["w"])
        each: dict[ClientId, Tree] = {i: dict(server["w"]) for i in ids}  # for clients without a stored body
        for i, r, tree in zip(known, rows.tolist(), mixed, strict=True):
            own = {} if i in server["answered"] else T.keep(T.unflatten(V[r], server["w"]), self._head)
            each[i] = {**T.drop(tree, self._head), **own}
        return Download(each=each)

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        return Start({**state.get("own", {}), **state.get("w", {}), **download})

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return ({**state, "w": trained.params} if round > self._fedavg_rounds() else state), upload

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if round <= self._fedavg_rounds():
            server = super().aggregate(server, uploads, round)
            return {**server, **(pairs.opened(server["w"], self.ctx.clients) if round == self._fedavg_rounds() else {})}
        server, rows = pairs.received(server, {u.sender: u.tree for u in uploads})
        weight, _ = self.ctx.net.head_names
        heads = torch.stack([u.tree[weight] for u in uploads])  # trained heads [answers, classes, d]
        server["similarity"][rows[:, None], rows] = cosine_rows(heads).clamp(min=0)
        return server

    def global_model(self, server: State) -> Tree | None:
        return None if server.get("answered") or not self._fedavg_rounds() else super().global_model(server)

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        if self.hp.score == "own" and "w" in state:
            return Model(state["w"])
        return Model({**state.get("own", {}), **state.get("w", {}), **download})
