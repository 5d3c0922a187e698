"""Ablations and controls of FedPC: the method with other defaults."""

from typing import Literal

from pydantic import Field

from coterie.methods.fedpc import FedPC
from coterie.methods.fedpc_settings import FedPCSettings


class OneGroup(FedPCSettings):
    J: int | None = Field(1, ge=1, description="number of groups; empty: chosen by silhouette")


class NoProto(FedPCSettings):
    gamma: float = Field(0.0, ge=0, description="weight of the pull towards the prototypes")


class NoMixing(FedPCSettings):
    inter: Literal["adaptive", "mean", "none"] = Field("none", description="mixing across groups")


class Mean(FedPCSettings):
    inter: Literal["adaptive", "mean", "none"] = Field("mean", description="mixing across groups")


class Random(FedPCSettings):
    grouping: Literal["prototypes", "random"] = Field("random", description="random: same sizes, as a control")


class FedPCJ1(FedPC):
    """One group: no clustering."""

    Settings, title = OneGroup, "FedPC J=1"


class FedPCNoProto(FedPC):
    """No pull towards the prototypes."""

    Settings, title = NoProto, "FedPC no prototype loss"


class FedPCNoMixing(FedPC):
    """Groups learn apart."""

    Settings, title = NoMixing, "FedPC no mixing"


class FedPCMean(FedPC):
    """Groups are averaged with equal weights: one global extractor."""

    Settings, title = Mean, "FedPC mean"


class FedPCRandom(FedPC):
    """Random groups of the same sizes: what the clustering itself is worth."""

    Settings, title = Random, "FedPC random groups"
