"""ECS-FL: one model for everybody, averaged over the devices whose models moved least."""

from coterie.methods.ecsfl.method import ECSFL
from coterie.methods.ecsfl.settings import ECSFLSettings
from coterie.methods.ecsfl.variants import ECSFLFarthest, ECSFLInvDist, ECSFLInvDistAll, ECSFLMeanAll, ECSFLRandom

__all__ = [
    "ECSFL",
    "ECSFLFarthest",
    "ECSFLInvDist",
    "ECSFLInvDistAll",
    "ECSFLMeanAll",
    "ECSFLRandom",
    "ECSFLSettings",
]
