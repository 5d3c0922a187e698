"""FedPC: clients grouped by class prototypes, extractors and prototypes mixed across similar groups."""

from coterie.methods.fedpc.mended import FedPCMended
from coterie.methods.fedpc.settings import FedPCMendedSettings, FedPCSettings
from coterie.methods.fedpc.text import FedPC
from coterie.methods.fedpc.variants import (
    FedPCCode,
    FedPCJ1,
    FedPCMean,
    FedPCMendedJ1,
    FedPCMendedMean,
    FedPCMendedNoMixing,
    FedPCMendedNoProto,
    FedPCMendedRandom,
    FedPCNoMixing,
    FedPCNoProto,
    FedPCRandom,
)

__all__ = [
    "FedPC",
    "FedPCCode",
    "FedPCJ1",
    "FedPCMean",
    "FedPCMended",
    "FedPCMendedJ1",
    "FedPCMendedMean",
    "FedPCMendedNoMixing",
    "FedPCMendedNoProto",
    "FedPCMendedRandom",
    "FedPCMendedSettings",
    "FedPCNoMixing",
    "FedPCNoProto",
    "FedPCRandom",
    "FedPCSettings",
]
