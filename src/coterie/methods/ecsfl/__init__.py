"""ECS-FL: one model for all clients, averaged over devices that are selected by how their models moved."""

from coterie.methods.ecsfl.mended import ECSFLMended
from coterie.methods.ecsfl.settings import ECSFLMendedSettings, ECSFLSettings
from coterie.methods.ecsfl.text import ECSFL
from coterie.methods.ecsfl.variants import (
    ECSFLFarthest,
    ECSFLInvDist,
    ECSFLInvDistAll,
    ECSFLMeanAll,
    ECSFLMendedFarthest,
    ECSFLMendedMeanAll,
    ECSFLMendedRandom,
    ECSFLNearest,
    ECSFLRandom,
    ECSFLWeighted,
)

__all__ = [
    "ECSFL",
    "ECSFLFarthest",
    "ECSFLInvDist",
    "ECSFLInvDistAll",
    "ECSFLMeanAll",
    "ECSFLMended",
    "ECSFLMendedFarthest",
    "ECSFLMendedMeanAll",
    "ECSFLMendedRandom",
    "ECSFLMendedSettings",
    "ECSFLNearest",
    "ECSFLRandom",
    "ECSFLSettings",
    "ECSFLWeighted",
]
