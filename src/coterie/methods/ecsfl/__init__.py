"""ECS-FL: one model for everybody, averaged over devices chosen by the distances of their models."""

from coterie.methods.ecsfl.method import ECSFL
from coterie.methods.ecsfl.settings import ECSFLSettings
from coterie.methods.ecsfl.variants import (
    ECSFLFarthest,
    ECSFLInvDist,
    ECSFLInvDistAll,
    ECSFLMeanAll,
    ECSFLNearest,
    ECSFLRandom,
)

__all__ = [
    "ECSFL",
    "ECSFLFarthest",
    "ECSFLInvDist",
    "ECSFLInvDistAll",
    "ECSFLMeanAll",
    "ECSFLNearest",
    "ECSFLRandom",
    "ECSFLSettings",
]
