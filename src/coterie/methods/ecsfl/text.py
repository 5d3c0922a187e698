"""ECS-FL. Wu, Liu, Modeling and Simulation 14(4), 2025, 1200-1211 (DOI 10.12677/mos.2025.144366).

One model for all clients. Devices train, and each edge server averages only those whose models ended nearest (L2) to
the model that it handed out, on the view that far models come from unusual data; the cloud combines the edges.
A device sits a round out while its last model is nearer than epsilon to the new one.

- The paper contradicts itself: Algorithms 1 and 2 average the nearest devices (10), but the proof is about weights 1/d
  over all devices (6), (12). This class follows the algorithms; the setting `aggregation` has the other ways.
- No device stops before it has trained (8).
- Selection follows the uploads and saves none; with `two_stage` devices send their distance, and only the selected
  send their models.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core.context import ClientData, ClientId, State
from coterie.core.edges import Edge
from coterie.core.method import Settings, Upload
from coterie.core.schema import Entry
from coterie.core.tree import Tree
from coterie.methods.ecsfl.devices import DISTANCE, SelectingEdges, of_models
from coterie.methods.ecsfl.selection import ranks_by_size, select
from coterie.methods.ecsfl.settings import ECSFLSettings
from coterie.parts.similarity import inverse_distances


class ECSFL(SelectingEdges):
    """The devices whose models are nearest to the old one."""

    Settings: ClassVar[type[Settings]] = ECSFLSettings
    hp: ECSFLSettings
    controls = ("ecs-fl-random", "ecs-fl-mean-all")

    def departures(self) -> list[str]:
        devices = len(self.ctx.clients)
        training = self.training(devices)
        if self.hp.train_fraction is not None or training == devices:
            return []
        return [
            f"Algorithm 2 trains all devices in every round; here {training} of {devices} train "
            "(train_fraction = 1: all)"
        ]

    def weight_entry(self, devices: int) -> Entry:
        if self.hp.aggregation == "mean":
            return super().weight_entry(devices)
        return Entry((1,), kind="control", part="selection", low=0, high=devices / self.hp.d_min)

    # ---- device ------------------------------------------------------------------------------------------------------
    def announced(self) -> dict[str, Entry]:
        return {DISTANCE: Entry((1,), kind="statistic", part="selection", low=0)} if self.hp.two_stage else {}

    def announcement(self, w: Tree, start: Tree, data: ClientData) -> Tree:
        if not self.hp.two_stage:
            return {}
        return {DISTANCE: self.distance(w, start, self.hp.distance_norm, len(data.train)).float()}

    # ---- edge --------------------------------------------------------------------------------------------------------
    def calls(self, edge: Edge, announced: Sequence[Upload], round: int) -> set[ClientId] | None:
        if not self.hp.two_stage:
            return None
        trained = [u for u in announced if DISTANCE in u.tree]
        d = torch.cat([u.tree[DISTANCE].double() for u in trained] or [torch.zeros(0)])
        return {trained[i].sender for i in self.selected(edge, trained, d, round)}

    def selected(self, edge: Edge, uploads: Sequence[Upload], d: Tensor, round: int) -> list[int]:
        """Return the positions of T_e: the smallest d_k, ties by id, or the devices of a different rule.

        Algorithm 1, lines 5 and 6; Algorithm 2, line 6.
        """
        ids = ranks_by_size(uploads) if self.hp.select == "random" else [u.sender for u in uploads]
        rng = self.ctx.rng("select", round, edge.id)
        return select(d, ids, self.count(edge), self.hp.select, self.hp.d_min, rng)

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        sent, before = of_models(uploads), edge.download.shared
        norm = self.hp.distance_norm
        d = torch.cat([self.distance(u.tree, before, norm, u.samples) for u in sent] or [torch.zeros(0)])  # (4), (9)
        if self.hp.two_stage or self.hp.aggregation == "invdist_all":
            T_e = (d >= self.hp.d_min).nonzero()[:, 0].tolist()
        else:
            T_e = self.selected(edge, sent, d, round)

        chosen = [sent[i] for i in T_e]
        if self.hp.aggregation == "mean":  # equation (10); Algorithm 2, line 7
            return self.averaged(edge, chosen, torch.ones(len(T_e)), torch.tensor([len(T_e)], dtype=torch.int32))
        weights = inverse_distances(d[T_e], self.hp.d_min)  # equations (5), (6) and (12)
        return self.averaged(edge, chosen, weights, weights.sum().float().reshape(1))
