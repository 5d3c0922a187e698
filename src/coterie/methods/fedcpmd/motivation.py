"""The motivation of FedCPMD's paper, section 4: what a personal layer is worth if every client is told which to keep.

X-full: all clients keep the same layer X from round 1. Mean-cluster: each client keeps the layer where its accuracy is
highest under X-full, and trains only with the clients that keep the same layer. There are no votes and no phases;
bodies are averaged by numbers of samples. `best_layers` of coterie.results.paper_metrics makes an assignment from runs
of X-full, and a user may give any other.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, EdgeId, State
from coterie.core.edges import EdgeMethod
from coterie.core.method import Client, Download, Method, Model, Moment, Settings, Trained, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.errors import CoterieError, unknown
from coterie.methods.fedcpmd.text import FedCPMD
from coterie.methods.fedcpmd.voting import shuffled


class FedCPMDFullSettings(Settings):
    layer: str = Field("", description="the layer that all clients keep from round 1; empty: the last linear one")


class FedCPMDFull(Method):
    """X-full of the paper's motivation: all clients keep the same layer, the other layers are averaged; no phases."""

    Settings = FedCPMDFullSettings
    hp: FedCPMDFullSettings
    card = replace(FedCPMD.card, title="FedCPMD X-full", family="S", personal="one layer, the same for all")

    def check(self) -> None:
        layers = self.ctx.net.layout.layers
        if self.hp.layer not in ("", *layers):
            raise unknown("layer", self.hp.layer, layers)
        if not self.hp.layer and not self.ctx.net.layout.of_kind("fc"):
            raise CoterieError("the model has no linear layer, so FedCPMD X-full needs a layer to be named")

    def private(self, name: str) -> bool:
        layer = self.hp.layer or self.ctx.net.layout.of_kind("fc")[-1]
        return name in self.ctx.group(f"layer:{layer}")


class FedCPMDAssignedSettings(Settings):
    assignment: list[str] = Field(
        [], description="the layer that each client keeps, in the order of clients; empty: the linear layers in turn"
    )


class FedCPMDAssigned(EdgeMethod):
    """Mean-cluster of the paper's motivation: clients with the same given layer train together, without phases.

    The server's state holds `w`, the body of each cluster. A newcomer gets the body of the largest cluster, and its own
    layer from the mean of the bodies of the clusters that share this layer.
    """

    Settings = FedCPMDAssignedSettings
    hp: FedCPMDAssignedSettings
    card = replace(FedCPMD.card, title="FedCPMD Mean-cluster", personal="the layer that a client is given")

    def check(self) -> None:
        layers, given, clients = self.ctx.net.layout.layers, self.hp.assignment, len(self.ctx.clients)
        if not given and not self.ctx.net.layout.of_kind("fc"):
            raise CoterieError("the model has no linear layer, so FedCPMD Mean-cluster needs an assignment")
        if given and len(given) != clients:
            raise CoterieError(f"assignment names the layers of {len(given)} clients, but the run has {clients}")
        for layer in given:
            if layer not in layers:
                raise unknown("layer", layer, layers)

    @property
    def layers(self) -> list[str]:
        """The layer of each client."""
        linear = self.ctx.net.layout.of_kind("fc")
        return self.hp.assignment or [linear[i % len(linear)] for i in range(len(self.ctx.clients))]

    def clusters(self) -> dict[EdgeId, list[ClientId]]:
        """Return the clients of each layer, by its place in the model."""
        order, given = self.ctx.net.layout.layers, dict(zip(self.ctx.clients, self.layers, strict=True))
        return {m: [i for i in given if given[i] == layer] for m, layer in enumerate(order) if layer in given.values()}

    def cluster(self, client: ClientId) -> EdgeId:
        """Return the cluster of a client; of a newcomer the largest one."""
        clusters = self.clusters()
        return next((m for m, ids in clusters.items() if client in ids), max(clusters, key=lambda m: len(clusters[m])))

    def body(self, cluster: EdgeId, tree: Tree) -> Tree:
        """Return what the members of a cluster share."""
        own = self.ctx.group(f"layer:{self.ctx.net.layout.layers[cluster]}")
        return T.drop(tree, lambda k: self.stays(k) or k in own)

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        if now is None:
            return Schema(like(T.drop(self.ctx.w0, self.stays), part="body")).optional()
        if link == "down" and now.client not in self.ctx.clients:
            return Schema(
                like(self._for_newcomers({m: self.body(m, self.ctx.w0) for m in self.clusters()}), part="body")
            )
        at = now.client if link.startswith("edge") else self.cluster(now.client)
        return Schema(like(self.body(at, self.ctx.w0), part="body"))

    # ---- server ------------------------------------------------------------------------------------------------------
    def setup(self) -> State:
        return {"w": {m: T.clone(self.body(m, self.ctx.w0)) for m in self.clusters()}}

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]]:
        return self.clusters()

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        pools = self.clusters().values()
        return sorted(i for pool in pools for i in shuffled(pool, rng)[: self.ctx.participants(len(pool))])

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        new = [i for i in ids if i not in self.ctx.clients]
        return Download(edge=server["w"], each=dict.fromkeys(new, self._for_newcomers(server["w"])) if new else {})

    def _for_newcomers(self, bodies: Mapping[EdgeId, Tree]) -> Tree:
        """Return the largest cluster's body, and its other entries as the mean of the bodies that have them."""
        names = {k for body in bodies.values() for k in body}
        having = {k: [body for body in bodies.values() if k in body] for k in self.ctx.w0 if k in names}
        means = {k: T.mean([{k: body[k]} for body in found])[k] for k, found in having.items()}
        return {**means, **bodies[max(self.clusters(), key=lambda m: len(self.clusters()[m]))]}

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Keep what the clusters' servers averaged, equation (5)."""
        return {**server, "w": {**server["w"], **{u.sender: u.tree for u in uploads}}}

    def global_model(self, server: State) -> Tree | None:
        return None

    def facts(self, server: State) -> dict[str, Any]:
        given = dict(zip(map(str, self.ctx.clients), self.layers, strict=True))
        return {"clusters": dict(Counter(self.layers)), "layer": given}

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        return {"own": T.clone(T.drop(self.ctx.w0, self.body(self.cluster(data.client), self.ctx.w0).__contains__))}

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "newcomer":
            return Model({**client.state.get("own", {}), **client.download})
        return super().model(view, client)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        body = self.body(self.cluster(data.client), trained.params)
        return {**state, "own": T.drop(trained.params, body.__contains__)}, Upload(body)
