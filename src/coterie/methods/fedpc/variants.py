"""Ablations and controls of FedPC and of its mended version: the methods with other defaults."""

from coterie.methods.fedpc.mended import FedPCMended
from coterie.methods.fedpc.text import FedPC
from coterie.parts.variants import variant

FedPCJ1 = variant(FedPC, "FedPCJ1", "FedPC J=1", "One group: no clustering.", J=1)
FedPCNoProto = variant(FedPC, "FedPCNoProto", "FedPC no prototype loss", "Prototypes teach nothing.", gamma=0.0)
FedPCNoMixing = variant(FedPC, "FedPCNoMixing", "FedPC no mixing", "Groups learn separately.", inter="none")
FedPCMean = variant(
    FedPC, "FedPCMean", "FedPC mean", "Groups are averaged with equal weights: one global extractor.", inter="mean"
)
FedPCRandom = variant(
    FedPC,
    "FedPCRandom",
    "FedPC random groups",
    "Random groups of the same sizes, which show what the clustering itself is worth.",
    grouping="random",
)
FedPCMendedJ1 = variant(FedPCMended, "FedPCMendedJ1", "FedPC (mended, J=1)", "One group: no clustering.", J=1)
FedPCMendedNoProto = variant(
    FedPCMended,
    "FedPCMendedNoProto",
    "FedPC (mended, no prototype loss)",
    "Prototypes teach nothing.",
    gamma=0.0,
    rehearsal=0.0,
)
FedPCMendedNoMixing = variant(
    FedPCMended, "FedPCMendedNoMixing", "FedPC (mended, no mixing)", "Groups learn separately.", inter="none"
)
FedPCMendedMean = variant(
    FedPCMended,
    "FedPCMendedMean",
    "FedPC (mended, mean)",
    "Groups are averaged with equal weights: one global extractor.",
    inter="mean",
)
FedPCMendedRandom = variant(
    FedPCMended,
    "FedPCMendedRandom",
    "FedPC (mended, random groups)",
    "Random groups of the same sizes, which show what the clustering itself is worth.",
    grouping="random",
)
