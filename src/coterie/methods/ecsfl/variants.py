"""Ablations and controls of ECS-FL: the same method with one default changed."""

from coterie.method import replace
from coterie.methods.ecsfl.method import ECSFL
from coterie.methods.ecsfl.settings import ECSFLSettings
from coterie.parts.variants import with_defaults


class ECSFLInvDist(ECSFL):
    """Weights 1/d over the selected: equation (6) on T."""

    Settings = with_defaults(ECSFLSettings, aggregation="invdist")
    card = replace(ECSFL.card, title="ECS-FL (1/d)")


class ECSFLInvDistAll(ECSFL):
    """Weights 1/d over all that uploaded: equation (6) as printed."""

    Settings = with_defaults(ECSFLSettings, aggregation="invdist_all")
    card = replace(ECSFL.card, title="ECS-FL (1/d, all)")


class ECSFLRandom(ECSFL):
    """Control: as many devices, drawn at random."""

    Settings = with_defaults(ECSFLSettings, select="random")
    card = replace(ECSFL.card, title="ECS-FL (random)")


class ECSFLFarthest(ECSFL):
    """Control: the farthest instead of the nearest."""

    Settings = with_defaults(ECSFLSettings, select="farthest")
    card = replace(ECSFL.card, title="ECS-FL (farthest)")


class ECSFLMeanAll(ECSFL):
    """Control: the plain mean of all devices."""

    Settings = with_defaults(ECSFLSettings, select_fraction=1.0)
    card = replace(ECSFL.card, title="ECS-FL (mean of all)")
