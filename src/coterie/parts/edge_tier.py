"""The tiers of a method whose clients are clustered once and then have one edge per cluster (SC-FPFL).

The method says when clusters are due, what clients send for them, how they are made and how the cloud mixes the edges'
models. Until then everybody is one cluster at the cloud. In the round that ends with clusters everybody takes part and
is asked for what the clusters are made from (one bit); who does not answer joins the largest. An edge that nobody
answered keeps its model.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from coterie import tree as T
from coterie.method import ClientId, Download, EdgeId, Method, Settings, State, Upload
from coterie.parts import moves
from coterie.parts.clusters import largest, of_cluster
from coterie.tree import Tree

ASK = "x:ask"


class EdgeSettings(Settings):
    """Says when clusters are made; a method's own settings override it. Default: in the opening."""

    def due(self, round: int) -> bool:
        """At the end of this round, if there are none yet?"""
        return True

    def follows(self) -> bool:
        """Does the cloud watch how far clients move until there are clusters?"""
        return False

    def triggered(self, seen: State, round: int) -> bool:
        """In the next round, judged by how far clients moved in this one?"""
        return False

    def possible(self, title: str, clients: int, rounds: int) -> None:
        """Raises CoterieError with one sentence for what cannot work in this run."""


class EdgesByCluster(Method):
    """State: theta, the edges' own models; hat, what the cloud made of them; cluster, client to edge."""

    hp: EdgeSettings
    question: ClassVar[bool] = True  # do clients send something that clusters are made from?

    def clusters(self, uploads: Sequence[Upload]) -> dict[ClientId, EdgeId]:
        raise NotImplementedError

    def mix(self, theta: dict[EdgeId, Tree], samples: dict[EdgeId, int], round: int) -> dict[EdgeId, Tree]:
        """What the cloud makes of the edges' models; default: nothing."""
        return {k: T.clone(w) for k, w in theta.items()}

    def check(self) -> None:
        self.hp.possible(self.title, len(self.ctx.clients), self.ctx.rounds)

    def part(self, name: str) -> str:
        return name.removeprefix("x:") if name.startswith("x:") else "model"

    def setup(self) -> State:
        w = T.clone(T.drop(self.ctx.w0, self.stays))
        seen = moves.start(w, self.ctx.clients, self._counts) if self.hp.follows() else {}
        return {"theta": {0: w}, "samples": {0: 0}, "hat": {0: T.clone(w)}, "cluster": {}, "ask": False, "moves": seen}

    def opening(self) -> bool:
        return True

    def asks(self, server: State, round: int) -> bool:
        """Is this the round that ends with clusters?"""
        return not server["cluster"] and bool(server["ask"] or self.hp.due(round))

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        return list(self.ctx.clients) if self.asks(server, round) else super().sample(server, round, rng)

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        of, hat = server["cluster"], server["hat"]
        if of:
            return Download(each={i: hat[largest(of)] for i in ids if i not in of}, edge=hat)
        asked = self.question and self.asks(server, round)
        return Download({**hat[0], **({ASK: torch.ones(1, dtype=torch.bool)} if asked else {})})

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        members: dict[EdgeId, list[ClientId]] = {k: [] for k in server["hat"]}
        for i, k in server["cluster"].items():
            members[k].append(i)
        return members if server["cluster"] else None

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if not server["cluster"]:
            return self._gather(server, uploads, round)
        theta = {**server["theta"], **{u.sender: u.tree for u in uploads}}
        samples = {**server["samples"], **{u.sender: u.samples for u in uploads}}
        return {**server, "theta": theta, "samples": samples, "hat": self.mix(theta, samples, round)}

    def _gather(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Straight from the clients: what edges would do, the cloud does for the one cluster or for the new ones."""
        asked = self.asks(server, round)
        of = self.clusters(uploads) if asked else {u.sender: 0 for u in uploads}
        groups = {k: of_cluster(uploads, of, k) for k in range(max(of.values()) + 1)}
        models = {k: [T.keep(u.tree, self.ctx.w0.__contains__) for u in g] for k, g in groups.items()}
        theta = {k: T.mean(models[k], self.weights(g)) for k, g in groups.items()}
        samples = {k: sum(u.samples for u in g) for k, g in groups.items()}
        out = {**server, "theta": theta, "samples": samples, "hat": self.mix(theta, samples, round)}
        if asked:
            return {**out, "cluster": {i: of.get(i, largest(of)) for i in self.ctx.clients}, "moves": {}}
        if not server["moves"]:
            return out
        seen = moves.follow(server["moves"], uploads, self._counts)
        return {**out, "moves": seen, "ask": self.hp.triggered(seen, round)}

    def _counts(self, name: str) -> bool:
        return name in self.ctx.net.trainable

    def facts(self, server: State) -> dict[str, Any]:
        return {"clusters": server["cluster"], **{k: v for k, v in server["moves"].items() if k != "last"}}


__all__ = ["ASK", "EdgeSettings", "EdgesByCluster"]
