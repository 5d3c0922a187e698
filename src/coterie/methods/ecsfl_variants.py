"""Ablations and controls of ECS-FL: the same method with one default changed."""

from coterie.methods.ecsfl import ECSFL
from coterie.methods.ecsfl_settings import ECSFLSettings
from coterie.parts.variants import with_defaults


class ECSFLInvDist(ECSFL):
    """Weights 1/d over the selected: equation (6) on T."""

    Settings = with_defaults(ECSFLSettings, aggregation="invdist")
    title = "ECS-FL (1/d)"


class ECSFLInvDistAll(ECSFL):
    """Weights 1/d over all that uploaded: equation (6) as printed."""

    Settings = with_defaults(ECSFLSettings, aggregation="invdist_all")
    title = "ECS-FL (1/d, all)"


class ECSFLRandom(ECSFL):
    """Control: as many devices, drawn at random."""

    Settings = with_defaults(ECSFLSettings, select="random")
    title = "ECS-FL (random)"


class ECSFLFarthest(ECSFL):
    """Control: the farthest instead of the nearest."""

    Settings = with_defaults(ECSFLSettings, select="farthest")
    title = "ECS-FL (farthest)"


class ECSFLMeanAll(ECSFL):
    """Control: the plain mean of all devices."""

    Settings = with_defaults(ECSFLSettings, select_fraction=1.0)
    title = "ECS-FL (mean of all)"
