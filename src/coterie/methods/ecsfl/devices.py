"""The devices, edges and cloud of ECS-FL, which the text and the mended method share."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, EdgeId, State
from coterie.core.edges import ANNOUNCE, Edge, EdgeMethod
from coterie.core.method import Card, Moment, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.errors import CoterieError
from coterie.methods.ecsfl.selection import DistanceNorm, model_distances, select_count
from coterie.methods.ecsfl.settings import DeviceSettings

DISTANCE = f"{ANNOUNCE}d"  # distance of a device's model, sent ahead of the model
WEIGHT = "x:weight"  # weight of an edge's mean at the cloud: |T_e|, or the sum of 1/d
AGGREGATED = "x:aggregated"  # ids of T_e, the devices in an edge's mean


class SelectingEdges(EdgeMethod):
    """Devices train, each edge averages the devices that it selects, and the cloud averages the edges.

    The server's state holds `w`; `selected`, how often each device was aggregated, in the order of ids; `alone`, the
    device that was aggregated alone in the last round, or -1.
    """

    hp: DeviceSettings
    weighting = "uniform"
    card = Card(
        title="ECS-FL",
        paper="Wu and Liu, Modeling and Simulation 2025, 10.12677/mos.2025.144366",
        year=2025,
        family="G",
        certainty="P",
    )

    def check(self) -> None:
        if self.hp.n_edges > len(self.ctx.clients):
            raise CoterieError(f"n_edges = {self.hp.n_edges} is more than the {len(self.ctx.clients)} devices")

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        if link == "up":
            return self._from_device(now)
        if link == "edge_up":
            return self._from_edge(now)
        return self.model_schema

    def _from_device(self, now: Moment | None) -> Schema:
        """The announcement, if there is one, and the model; a device that stops sends nothing."""
        if now and self.hp.epsilon and now.client == now.server["alone"]:
            return Schema({}, may_be_empty=True)  # the new model is the one it has, so it stops
        return Schema({**self.model_schema.entries, **self.announced()}, may_be_empty=self.hp.epsilon > 0)

    def announced(self) -> dict[str, Entry]:
        """Return the entries that a device sends ahead of its model."""
        return {}

    def _from_edge(self, now: Moment | None) -> Schema:
        """The mean of the selected devices, its weight and their ids."""
        devices = self.ctx.clients if now is None else self.edges(now.server)[now.client]
        ids = Entry(("aggregated",), torch.int32, "control", "selection", min(devices), max(devices), distinct=True)
        entries = {**self.model_schema.entries, WEIGHT: self.weight_entry(len(devices)), AGGREGATED: ids}
        return Schema(entries, {"aggregated": (0, len(devices))})

    def weight_entry(self, devices: int) -> Entry:
        """Return the entry of an edge's weight: the number of devices in its mean."""
        return Entry((1,), torch.int32, "control", "selection", 0, devices)

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def setup(self) -> State:
        """Start from a random model, which all devices receive; Algorithm 2, line 1."""
        return {**super().setup(), "selected": [0] * len(self.ctx.clients), "alone": -1}

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]]:
        return {e: list(self.ctx.clients[e :: self.hp.n_edges]) for e in range(self.hp.n_edges)}

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        if self.hp.train_fraction is None:
            return super().sample(server, round, rng)
        order = torch.randperm(len(self.ctx.clients), generator=rng)
        return sorted(self.ctx.clients[i] for i in order[: self.training(len(order))])

    def training(self, devices: int) -> int:
        """Return K, how many of this number of devices train in a round."""
        fraction = self.ctx.join if self.hp.train_fraction is None else self.hp.train_fraction
        return max(1, int(fraction * devices + 0.5))

    # ---- device ------------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        """Start from the received model unless the device has converged; Algorithm 2, lines 9, 10 and 12."""
        w = super().begin(state, download, data, round).params
        near = "last" in state and float(self.distance(state["last"], w)) < self.hp.epsilon  # equation (8)
        idle = near or state.get("stopped", False)
        return Start(w, {"start": w, "idle": idle}, train=not idle)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        """Send the trained model to the edge; Algorithm 2, line 4."""
        if trained.extras["idle"]:
            return {**state, "stopped": self.hp.stop == "forever"}, Upload({}, {"stopped": 1.0})
        state, upload = super().end(state, trained, data, round)
        if self.hp.epsilon:
            state = {**state, "last": T.keep(trained.params, self.measured)}
        ahead = self.announcement(trained.params, trained.extras["start"], data)
        return state, Upload({**upload.tree, **ahead}, {"stopped": 0.0})

    def announcement(self, w: Tree, start: Tree, data: ClientData) -> Tree:
        """Return what a device that trained sends ahead of its model."""
        return {}

    def measured(self, name: str) -> bool:
        """True for parameters; distances leave out batch-norm statistics."""
        return name in self.ctx.net.trainable

    def distance(self, w: Tree, reference: Tree, norm: DistanceNorm = "none", samples: int = 0) -> Tensor:
        """Return d_k [1] of one model, equations (4) and (9)."""
        steps = self.ctx.local_steps or math.ceil(self.ctx.epochs * math.ceil(samples / self.ctx.batch))
        return model_distances(T.stack([T.keep(w, self.measured)]), reference, norm, torch.tensor([steps]))

    # ---- edge --------------------------------------------------------------------------------------------------------
    def count(self, edge: Edge) -> int:
        """Return |T_e|, the number of devices that an edge aggregates: max(1, ceil(r_sel K_e))."""
        training = self.training(len(edge.clients))
        return max(select_count(self.hp.select_fraction, training), min(self.hp.select_least, training))

    def averaged(self, edge: Edge, chosen: Sequence[Upload], weights: Tensor, total: Tensor) -> tuple[State, Upload]:
        """Return the mean of the chosen devices' models; without any, the model that the edge received."""
        models = [T.untagged(u.tree) for u in chosen]
        w = T.mean(models, weights) if models else edge.download.shared
        ids = torch.tensor([u.sender for u in chosen], dtype=torch.int32)
        return edge.state, Upload({**w, WEIGHT: total, AGGREGATED: ids})

    # ---- cloud, up ---------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        devices = self.edges(server)
        chosen = {i for u in uploads for i in u.tree[AGGREGATED].tolist() if i in devices[u.sender]}
        weights = [float(u.tree[WEIGHT]) for u in uploads]
        if not chosen or not sum(weights):
            return server

        counts = [n + (i in chosen) for n, i in zip(server["selected"], self.ctx.clients, strict=True)]
        alone = chosen.pop() if len(chosen) == 1 else -1
        return {"w": T.mean([T.untagged(u.tree) for u in uploads], weights), "selected": counts, "alone": alone}

    def facts(self, server: State) -> dict[str, Any]:
        return {"selected": server["selected"]}


def of_models(uploads: Sequence[Upload]) -> list[Upload]:
    """Return the uploads that hold a model: neither of devices that stopped nor of devices that were not called.

    Algorithm 2, line 5.
    """
    return [u for u in uploads if T.untagged(u.tree)]
