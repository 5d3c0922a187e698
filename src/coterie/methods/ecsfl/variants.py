"""Ablations and controls of ECS-FL and of its mended version."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.context import ClientData
from coterie.core.edges import Edge
from coterie.core.method import Upload
from coterie.core.schema import Entry
from coterie.core.tree import Tree
from coterie.methods.ecsfl.devices import DISTANCE
from coterie.methods.ecsfl.mended import ECSFLMended
from coterie.methods.ecsfl.selection import Rule, ranks_by_size, select
from coterie.methods.ecsfl.settings import ECSFLMendedSettings, ECSFLSettings
from coterie.methods.ecsfl.text import ECSFL
from coterie.parts.variants import with_defaults

PER_STEP = {"distance_norm": "per_step", "train_fraction": 0.1}  # distances per local step, a tenth of the devices


class ECSFLInvDist(ECSFL):
    """Weights 1/d over the selected: equation (6) on T."""

    Settings = with_defaults(ECSFLSettings, aggregation="invdist")
    card = replace(ECSFL.card, title="ECS-FL (1/d)")


class ECSFLInvDistAll(ECSFL):
    """Weights 1/d over all that uploaded: equation (6) as printed, with distances per local step."""

    Settings = with_defaults(ECSFLSettings, aggregation="invdist_all", distance_norm="per_step")
    card = replace(ECSFL.card, title="ECS-FL (1/d, all)")


# ---- controls of the text --------------------------------------------------------------------------------------------
class ECSFLRandom(ECSFL):
    """As many devices, drawn at random."""

    Settings = with_defaults(ECSFLSettings, select="random", **PER_STEP)
    card = replace(ECSFL.card, title="ECS-FL (random)")


class ECSFLFarthest(ECSFL):
    """The farthest devices instead of the nearest."""

    Settings = with_defaults(ECSFLSettings, select="farthest", **PER_STEP)
    card = replace(ECSFL.card, title="ECS-FL (farthest)")


class ECSFLMeanAll(ECSFL):
    """The plain mean of all devices."""

    Settings = with_defaults(ECSFLSettings, select_fraction=1.0, **PER_STEP)
    card = replace(ECSFL.card, title="ECS-FL (mean of all)")


# ---- controls of the mended version ----------------------------------------------------------------------------------
class _ByDistance(ECSFLMended):
    """Devices announce their distance, and a rule selects as many of them as herding would."""

    rule: Rule

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
    """As many devices, drawn at random."""

    card = replace(ECSFLMended.card, title="ECS-FL (mended, random)")
    rule = "random"


class ECSFLMendedFarthest(_ByDistance):
    """The devices that moved most."""

    card = replace(ECSFLMended.card, title="ECS-FL (mended, farthest)")
    rule = "farthest"


class ECSFLMendedMeanAll(ECSFLMended):
    """The plain mean of all devices."""

    Settings = with_defaults(ECSFLMendedSettings, select_fraction=1.0)
    card = replace(ECSFLMended.card, title="ECS-FL (mended, mean of all)")
