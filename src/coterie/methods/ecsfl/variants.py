"""Ablations and controls of ECS-FL and of its mended version."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core.context import ClientData
from coterie.core.edges import Edge
from coterie.core.method import Settings, Upload
from coterie.core.schema import Entry
from coterie.core.tree import Tree
from coterie.methods.ecsfl.devices import DISTANCE
from coterie.methods.ecsfl.mended import ECSFLMended
from coterie.methods.ecsfl.selection import Rule, ranks_by_size, select
from coterie.methods.ecsfl.settings import MendedDeviceSettings
from coterie.methods.ecsfl.text import ECSFL
from coterie.parts.variants import variant

ECSFLInvDist = variant(
    ECSFL, "ECSFLInvDist", "ECS-FL (1/d)", "Weights 1/d over the selected: equation (6) on T.", aggregation="invdist"
)
ECSFLInvDistAll = variant(
    ECSFL, "ECSFLInvDistAll", "ECS-FL (1/d, all)", "Weights 1/d over all devices that trained, equations (6) and (12).",
    aggregation="invdist_all",
)  # fmt: skip

# ---- controls of the text --------------------------------------------------------------------------------------------
ECSFLRandom = variant(ECSFL, "ECSFLRandom", "ECS-FL (random)", "As many devices, drawn at random.", select="random")
ECSFLFarthest = variant(
    ECSFL, "ECSFLFarthest", "ECS-FL (farthest)", "The farthest devices instead of the nearest.", select="farthest"
)
ECSFLMeanAll = variant(
    ECSFL, "ECSFLMeanAll", "ECS-FL (mean of all)", "The plain mean of all devices that trained.", select_fraction=1.0
)


# ---- controls of the mended version ----------------------------------------------------------------------------------
class _ByDistance(ECSFLMended):
    """Devices announce their distance, and a rule selects as many of them as herding would."""

    Settings: ClassVar[type[Settings]] = MendedDeviceSettings
    rule: ClassVar[Rule]

    def announced(self) -> dict[str, Entry]:
        return {DISTANCE: Entry((1,), kind="statistic", part="selection", low=0)}

    def announcement(self, w: Tree, start: Tree, data: ClientData) -> Tree:
        return {DISTANCE: self.distance(w, start).float()}

    def selected(self, edge: Edge, trained: Sequence[Upload], round: int) -> list[int]:
        d: Tensor = torch.cat([u.tree[DISTANCE].double() for u in trained])
        ids = ranks_by_size(trained) if self.rule == "random" else [u.sender for u in trained]
        rng = self.ctx.rng("select", round, edge.id)
        return select(d, ids, self.count(edge), self.rule, self.hp.d_min, rng)


class ECSFLMendedRandom(_ByDistance):
    """The same number of devices, drawn at random."""

    card = replace(ECSFLMended.card, title="ECS-FL (mended, random)")
    rule = "random"


class ECSFLMendedFarthest(_ByDistance):
    """The devices that moved most."""

    card = replace(ECSFLMended.card, title="ECS-FL (mended, farthest)")
    rule = "farthest"


ECSFLMendedMeanAll = variant(
    ECSFLMended, "ECSFLMendedMeanAll", "ECS-FL (mended, mean of all)", "The plain mean of all devices that trained.",
    select_fraction=1.0,
)  # fmt: skip
