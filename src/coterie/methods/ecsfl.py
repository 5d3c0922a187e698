"""ECS-FL. Wu, Liu, Modeling and Simulation 14(4), 2025, 1200-1211 (DOI 10.12677/mos.2025.144366).

One model for everybody. All devices train, and each edge server averages only those whose weights ended nearest (L2) to
the model it handed out, on the view that far models come from unusual data; the cloud combines the edges.
A device sits a round out while its last model is nearer than epsilon to the new one. Where the paper contradicts
itself: the mean over the selected (10), not weights over all (6); and no stop before a device has trained (8).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coterie import tree as T
from coterie.errors import CoterieError
from coterie.method import ANNOUNCE, ClientData, ClientId, Edge, EdgeId, Extras, Method, Payload, State, Tree, Upload
from coterie.methods.ecsfl_settings import ECSFLSettings
from coterie.parts.edge_mean import edge_mean, ranks_by_size
from coterie.parts.selection import model_distances, select, select_count

D, WEIGHT = f"{ANNOUNCE}d", "x:weight"


class ECSFL(Method):
    Settings = ECSFLSettings
    hp: ECSFLSettings
    title = "ECS-FL"
    certainty = "P"
    paper = "Wu and Liu, Modeling and Simulation 2025, 10.12677/mos.2025.144366"
    year = 2025
    family = "G"
    weighting = "uniform"

    def check(self) -> None:
        if self.hp.n_edges > len(self.ctx.clients):
            raise CoterieError(f"n_edges = {self.hp.n_edges} is more than the {len(self.ctx.clients)} devices")
        if self.hp.two_stage and self.hp.aggregation == "invdist_all":
            raise CoterieError("two_stage sends the selected models only, but aggregation = invdist_all needs all")

    def payload(self, labels: int, round: int = 1) -> Payload:
        """Of a device that trains and, under two_stage, is selected."""
        up, down = super().payload(labels, round)
        return Payload(up + 4 * self.hp.two_stage, down)

    def payload_of(self, server: State, client: ClientId, labels: int, round: int) -> Payload:
        """The only device selected in the round before has just that model, so it stops."""
        up, down = self.payload(labels, round)
        return Payload(0 if self.hp.epsilon and client == server["alone"] else up, down)

    def setup(self) -> State:
        return {**super().setup(), "selected": [0] * len(self.ctx.clients), "alone": -1}

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]]:
        return {e: list(self.ctx.clients[e :: self.hp.n_edges]) for e in range(self.hp.n_edges)}

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        order = torch.randperm(len(self.ctx.clients), generator=rng)
        return sorted(self.ctx.clients[i] for i in order[: self._training(len(order))])

    def _training(self, devices: int) -> int:
        return max(1, int(self.hp.train_fraction * devices + 0.5))

    # ---- device ------------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        w, _ = super().begin(state, download, data, round)
        near = "last" in state and float(self._distance(state["last"], w)) < self.hp.epsilon  # eq. (8)
        return w, {"start": w, "idle": near or state.get("stopped", False)}

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        if extras["idle"]:
            return {**state, "stopped": self.hp.stop == "forever"}, Upload({}, {"stopped": 1.0})
        state, upload = super().end(state, params, extras, data, round)
        last = {"last": T.keep(params, self._measured)} if self.hp.epsilon else {}
        ahead = {D: self._distance(params, extras["start"], len(data.train)).float()} if self.hp.two_stage else {}
        return {**state, **last}, Upload({**upload.tree, **ahead}, {"stopped": 0.0})

    def _measured(self, name: str) -> bool:
        return name in self.ctx.net.trainable  # A17: no buffers

    def _distance(self, w: Tree, reference: Tree, samples: int = 0) -> Tensor:
        """d_k [1] of one model (a stack of a hundred in float64 would not fit); plain if `samples` is not given."""
        steps = torch.tensor([math.ceil(self.ctx.epochs * math.ceil(samples / self.ctx.batch))])
        norm = self.hp.distance_norm if samples else "none"
        return model_distances(T.stack([T.keep(w, self._measured)]), reference, norm, steps)

    # ---- edge --------------------------------------------------------------------------------------------------------
    def calls(self, edge: Edge, announced: Sequence[Upload], round: int) -> set[ClientId] | None:
        if not self.hp.two_stage:
            return None
        there = [u for u in announced if D in u.tree]
        d = torch.cat([u.tree[D].double() for u in there] or [torch.zeros(0)])
        return {there[i].sender for i in self._select(edge, there, d, round)}

    def _select(self, edge: Edge, uploads: Sequence[Upload], d: Tensor, round: int) -> list[int]:
        """Positions of T_e: the max(1, ceil(r_sel K_e)) smallest d_k, ties by id."""
        count = select_count(self.hp.select_fraction, self._training(len(edge.clients)))
        ids = ranks_by_size(uploads) if self.hp.select == "random" else [u.sender for u in uploads]
        return select(d, ids, count, self.hp.select, self.hp.d_min, self.ctx.rng("select", round, edge.id))

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        before, hp = edge.download.shared, self.hp
        A = [u for u in uploads if T.drop(u.tree, _marked)]  # without those who stopped or were not called
        d = torch.cat([self._distance(u.tree, before, u.samples) for u in A] or [torch.zeros(0)])
        every = hp.two_stage or hp.aggregation == "invdist_all"
        T_e = (d >= hp.d_min).nonzero()[:, 0].tolist() if every else self._select(edge, A, d, round)
        w, weight = edge_mean([T.drop(A[i].tree, _marked) for i in T_e], d[T_e], hp.aggregation, hp.d_min, before)
        return edge.state, Upload({**w, WEIGHT: weight}, {str(A[i].sender): 1.0 for i in T_e})

    # ---- cloud -------------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        weights = [float(u.tree[WEIGHT]) for u in uploads]
        chosen = {int(i) for u in uploads for i in u.note}
        counts = [n + (i in chosen) for n, i in zip(server["selected"], self.ctx.clients, strict=True)]
        models = [T.drop(u.tree, _marked) for u in uploads]
        if not chosen:
            return server
        alone = chosen.pop() if len(chosen) == 1 else -1
        return {"w": T.mean(models, weights), "selected": counts, "alone": alone}

    def facts(self, server: State) -> dict[str, Any]:
        return {"selected": server["selected"]}  # times each device was aggregated so far, in the order of ids


def _marked(name: str) -> bool:
    return ":" in name
