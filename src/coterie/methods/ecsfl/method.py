"""ECS-FL. Wu, Liu, Modeling and Simulation 14(4), 2025, 1200-1211 (DOI 10.12677/mos.2025.144366).

One model for everybody. All devices train, and each edge server averages only those whose weights ended nearest (L2) to
the model it handed out, on the view that far models come from unusual data; the cloud combines the edges.
A device sits a round out while its last model is nearer than epsilon to the new one.
Where the paper contradicts itself, reading = paper takes the weights 1/d over all (6), which its proof is about, not
the mean over the nearest (10): these starve classes; and nobody stops before it has trained (8).
By default (reading = mended) the edge takes the devices whose mean is nearest to the mean of all (herding): each sends
a random projection of its update first, and only the chosen send their models.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.edges import ANNOUNCE, Edge, EdgeMethod
from coterie.core.method import Card, ClientData, ClientId, EdgeId, Model, Moment, Start, State, Trained, Tree, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.errors import CoterieError
from coterie.methods.ecsfl.selection import model_distances, projected, ranks_by_size, select, select_count
from coterie.methods.ecsfl.settings import ECSFLSettings
from coterie.parts.keep_best import best, kept
from coterie.parts.similarity import inverse_distances

DISTANCE = f"{ANNOUNCE}d"  # of a device's model, sent ahead of it under two_stage
PROJECTION = f"{ANNOUNCE}p"  # of its update, instead of the distance when herding
WEIGHT = "x:weight"  # of an edge's mean at the cloud: |T_e|, or the sum of 1/d
AGGREGATED = "x:aggregated"  # ids of T_e, the devices in an edge's mean


class ECSFL(EdgeMethod):
    """Server state: w; selected, how often each device was aggregated, in the order of ids; alone, the device that was
    aggregated alone in the last round, or -1.
    """

    Settings = ECSFLSettings
    hp: ECSFLSettings
    weighting = "uniform"
    controls = ("ecs-fl-random", "ecs-fl-nearest", "ecs-fl-mean-all")
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
        if self.hp.two_stage and self.hp.aggregation == "invdist_all":
            raise CoterieError("two_stage sends the selected models only, but aggregation = invdist_all needs all")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        if link == "up":
            return self._from_device(now)
        if link == "edge_up":
            return self._from_edge(now)
        return self.model_schema

    def _from_device(self, now: Moment | None) -> Schema:
        """The model, and under two_stage what decides ahead of it; a device that stops sends nothing."""
        if now and self.hp.epsilon and now.client == now.server["alone"]:
            return Schema({}, may_be_empty=True)  # the new model is the one it has, so it stops
        entries = dict(self.model_schema.entries)
        if self.hp.two_stage and self.hp.select == "herding":
            entries[PROJECTION] = Entry((self.hp.projection,), kind="statistic", part="selection")
        elif self.hp.two_stage:
            entries[DISTANCE] = Entry((1,), kind="statistic", part="selection", low=0)
        return Schema(entries, may_be_empty=self.hp.epsilon > 0)

    def _from_edge(self, now: Moment | None) -> Schema:
        """The mean of the selected devices, its weight and their ids."""
        devices = self.ctx.clients if now is None else self.edges(now.server)[now.client]
        if self.hp.aggregation == "mean":
            weight = Entry((1,), torch.int32, "control", "selection", 0, len(devices))
        else:
            weight = Entry((1,), kind="control", part="selection", low=0, high=len(devices) / self.hp.d_min)
        ids = Entry(("aggregated",), torch.int32, "control", "selection", min(devices), max(devices), distinct=True)
        entries = {**self.model_schema.entries, WEIGHT: weight, AGGREGATED: ids}
        return Schema(entries, {"aggregated": (0, len(devices))})

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def setup(self) -> State:
        return {**super().setup(), "selected": [0] * len(self.ctx.clients), "alone": -1}

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]]:
        return {e: list(self.ctx.clients[e :: self.hp.n_edges]) for e in range(self.hp.n_edges)}

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        order = torch.randperm(len(self.ctx.clients), generator=rng)
        return sorted(self.ctx.clients[i] for i in order[: self._training(len(order))])

    def _training(self, devices: int) -> int:
        """K: how many of so many devices train in a round."""
        return max(1, int(self.hp.train_fraction * devices + 0.5))

    # ---- device ------------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        w = super().begin(state, download, data, round).params
        near = "last" in state and float(self._distance(state["last"], w)) < self.hp.epsilon  # equation (8)
        idle = near or state.get("stopped", False)
        return Start(w, {"start": w, "idle": idle}, train=not idle)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        if trained.extras["idle"]:
            return {**state, "stopped": self.hp.stop == "forever"}, Upload({}, {"stopped": 1.0})

        state, upload = super().end(state, trained, data, round)
        if self.hp.use == "best":
            state = {**state, **kept(self.ctx, state, trained.params, data)}
        if self.hp.epsilon:
            state = {**state, "last": T.keep(trained.params, self._measured)}
        tree = upload.tree
        if self.hp.two_stage and self.hp.select == "herding":
            tree = {**tree, PROJECTION: self._projection(trained.params, trained.extras["start"])}
        elif self.hp.two_stage:
            tree = {**tree, DISTANCE: self._distance(trained.params, trained.extras["start"], len(data.train)).float()}
        return state, Upload(tree, {"stopped": 0.0})

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        params, extras = super().personal(state, download, data)
        return Model(best(self.ctx, state, params, data) if self.hp.use == "best" else params, extras)

    def _projection(self, w: Tree, reference: Tree) -> Tensor:
        """Of the update [projection]; the same for all devices and rounds."""
        measured = T.keep(w, self._measured)
        update = T.flatten(measured) - T.flatten(T.keep(reference, self._measured))
        return projected(update, self.hp.projection, self.ctx.rng("projection")).float()

    def _measured(self, name: str) -> bool:
        """Distances are over parameters, not over batch-norm statistics."""
        return name in self.ctx.net.trainable

    def _distance(self, w: Tree, reference: Tree, samples: int = 0) -> Tensor:
        """d_k [1] of one model (a stack of a hundred in float64 would not fit); plain if `samples` is not given."""
        steps = torch.tensor([math.ceil(self.ctx.epochs * math.ceil(samples / self.ctx.batch))])
        norm = self.hp.distance_norm if samples else "none"
        return model_distances(T.stack([T.keep(w, self._measured)]), reference, norm, steps)

    # ---- edge --------------------------------------------------------------------------------------------------------
    def calls(self, edge: Edge, announced: Sequence[Upload], round: int) -> set[ClientId] | None:
        if not self.hp.two_stage:
            return None
        if self.hp.select == "herding":
            trained = [u for u in announced if PROJECTION in u.tree]
            updates = torch.stack([u.tree[PROJECTION] for u in trained] or [torch.zeros(self.hp.projection)])
            d = updates.double().norm(dim=1)[: len(trained)]
            return {trained[i].sender for i in self._select(edge, trained, d, round, updates)}
        trained = [u for u in announced if DISTANCE in u.tree]
        d = torch.cat([u.tree[DISTANCE].double() for u in trained] or [torch.zeros(0)])
        return {trained[i].sender for i in self._select(edge, trained, d, round)}

    def _select(
        self, edge: Edge, uploads: Sequence[Upload], d: Tensor, round: int, updates: Tensor | None = None
    ) -> list[int]:
        """Positions of T_e: the max(1, ceil(r_sel K_e)) smallest d_k, ties by id, or those of another rule."""
        training = self._training(len(edge.clients))
        count = max(select_count(self.hp.select_fraction, training), min(self.hp.select_least, training))
        ids = ranks_by_size(uploads) if self.hp.select == "random" else [u.sender for u in uploads]
        rng = self.ctx.rng("select", round, edge.id)
        return select(d, ids, count, self.hp.select, self.hp.d_min, rng, updates)

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        before = edge.download.shared
        sent = [u for u in uploads if _model(u.tree)]  # without those who stopped or were not called
        d = torch.cat([self._distance(u.tree, before, u.samples) for u in sent] or [torch.zeros(0)])

        if self.hp.two_stage or self.hp.aggregation == "invdist_all":
            T_e = (d >= self.hp.d_min).nonzero()[:, 0].tolist()
        else:
            herding = self.hp.select == "herding" and sent
            updates = torch.stack([self._projection(u.tree, before) for u in sent]) if herding else None
            T_e = self._select(edge, sent, d, round, updates)

        if self.hp.aggregation == "mean":  # equation (10)
            weights = torch.ones(len(T_e))
            total = torch.tensor([len(T_e)], dtype=torch.int32)
        else:  # equation (6)
            weights = inverse_distances(d[T_e], self.hp.d_min)
            total = weights.sum().float().reshape(1)

        w = T.mean([_model(sent[i].tree) for i in T_e], weights) if T_e else before
        ids = torch.tensor([sent[i].sender for i in T_e], dtype=torch.int32)
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
        return {"w": T.mean([_model(u.tree) for u in uploads], weights), "selected": counts, "alone": alone}

    def facts(self, server: State) -> dict[str, Any]:
        return {"selected": server["selected"]}


def _model(tree: Tree) -> Tree:
    """The entries of the model in a payload."""
    return T.untagged(tree)
