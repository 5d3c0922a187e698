"""ECS-FL mended: devices whose mean is nearest to the mean of all. Coterie's own, 2026.

After ECS-FL (Wu, Liu, Modeling and Simulation 2025). Each device that trains first sends a random projection of its
update. The edge selects the devices whose mean projection is nearest to the mean of all (herding). Only these send
their models, which the edge averages.

- Distance is measured for the aggregate, not for single devices, so that classes with unusual models are covered.
- Devices announce themselves, so that the uplink carries a tenth of the models (at least `select_least` of an edge).
- A client uses the best model it has trained, by its validation data, unless the received model is better.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, State
from coterie.core.edges import ANNOUNCE, Edge
from coterie.core.method import Settings, Upload
from coterie.core.schema import Entry
from coterie.core.tree import Tree
from coterie.methods.ecsfl.devices import SelectingEdges, of_models
from coterie.methods.ecsfl.selection import herd, projected, usable
from coterie.methods.ecsfl.settings import ECSFLMendedSettings

PROJECTION = f"{ANNOUNCE}p"  # random projection of a device's update, sent ahead of its model


class ECSFLMended(SelectingEdges):
    """Herding on random projections of updates."""

    Settings: ClassVar[type[Settings]] = ECSFLMendedSettings
    hp: ECSFLMendedSettings
    card = replace(SelectingEdges.card, title="ECS-FL (mended)", certainty="O")
    use = "best"
    controls = ("ecs-fl-mended-random", "ecs-fl", "ecs-fl-mended-mean-all")

    # ---- device ------------------------------------------------------------------------------------------------------
    def announced(self) -> dict[str, Entry]:
        return {PROJECTION: Entry((self.hp.projection,), kind="statistic", part="selection")}

    def announcement(self, w: Tree, start: Tree, data: ClientData) -> Tree:
        update = T.flatten(T.keep(w, self.measured)) - T.flatten(T.keep(start, self.measured))
        # the same projection for all devices and rounds
        return {PROJECTION: projected(update, self.hp.projection, self.ctx.rng("projection")).float()}

    # ---- edge --------------------------------------------------------------------------------------------------------
    def calls(self, edge: Edge, announced: Sequence[Upload], round: int) -> set[ClientId]:
        trained = [u for u in announced if self.announced().keys() <= u.tree.keys()]
        return {trained[i].sender for i in self.selected(edge, trained, round)} if trained else set()

    def selected(self, edge: Edge, trained: Sequence[Upload], round: int) -> list[int]:
        """Return the positions of T_e in order of id: the devices whose mean update is nearest to the mean of all."""
        updates = torch.stack([u.tree[PROJECTION] for u in trained])
        order = usable(updates.double().norm(dim=1), [u.sender for u in trained], self.hp.d_min)
        return [order[i] for i in sorted(herd(updates[order], self.count(edge)))]

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        chosen = [u for u in of_models(uploads) if self._moved(u, edge.download.shared)]
        return self.averaged(edge, chosen, torch.ones(len(chosen)), torch.tensor([len(chosen)], dtype=torch.int32))

    def _moved(self, upload: Upload, before: Tree) -> bool:
        distance: Tensor = self.distance(upload.tree, before)
        return bool(distance >= self.hp.d_min)
