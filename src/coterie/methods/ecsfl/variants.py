"""Ablations and controls of ECS-FL: the same method with one default changed."""

from coterie.core.method import replace
from coterie.methods.ecsfl.method import ECSFL
from coterie.methods.ecsfl.settings import ECSFLSettings
from coterie.parts.variants import with_defaults

NEAREST = {
    "reading": "paper", "aggregation": "mean", "select": "nearest", "distance_norm": "none", "train_fraction": 1.0
}  # fmt: skip


class ECSFLNearest(ECSFL):
    """The plain mean of the devices that moved least: equation (10)."""

    Settings = with_defaults(ECSFLSettings, **NEAREST)
    card = replace(ECSFL.card, title="ECS-FL (nearest)")


class ECSFLInvDist(ECSFL):
    """Weights 1/d over the selected: equation (6) on T."""

    Settings = with_defaults(ECSFLSettings, **{**NEAREST, "aggregation": "invdist"})
    card = replace(ECSFL.card, title="ECS-FL (1/d)")


class ECSFLInvDistAll(ECSFL):
    """Weights 1/d over all that uploaded: equation (6) as printed."""

    Settings = with_defaults(ECSFLSettings, reading="paper", aggregation="invdist_all", train_fraction=1.0)
    card = replace(ECSFL.card, title="ECS-FL (1/d, all)")


class ECSFLRandom(ECSFL):
    """Control: as many devices, drawn at random."""

    Settings = with_defaults(ECSFLSettings, aggregation="mean", select="random")
    card = replace(ECSFL.card, title="ECS-FL (random)")


class ECSFLFarthest(ECSFL):
    """Control: the farthest instead of the nearest."""

    Settings = with_defaults(ECSFLSettings, aggregation="mean", select="farthest")
    card = replace(ECSFL.card, title="ECS-FL (farthest)")


class ECSFLMeanAll(ECSFL):
    """Control: the plain mean of all devices."""

    Settings = with_defaults(ECSFLSettings, aggregation="mean", select_fraction=1.0)
    card = replace(ECSFL.card, title="ECS-FL (mean of all)")
