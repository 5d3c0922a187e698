"""Settings of ECS-FL; docs/methods/ecs-fl.md gives the reasons for the defaults."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from coterie.methods.ecsfl.selection import DistanceNorm, Rule
from coterie.parts.keep_best import USE, Use
from coterie.parts.readings import ReadingSettings


class ECSFLSettings(ReadingSettings):
    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "aggregation": "invdist_all", "select": "nearest", "distance_norm": "per_step", "train_fraction": 0.1,
            "two_stage": False, "select_least": 1,
        },
        "mended": {
            "aggregation": "mean", "select": "herding", "distance_norm": "none", "train_fraction": 1.0,
            "two_stage": True, "select_least": 8, "use": "best",
        },
    }  # fmt: skip
    reading: Literal["paper", "mended"] = Field(
        "mended", description="the text, or the devices whose mean is nearest to the mean of all"
    )

    aggregation: Literal["mean", "invdist", "invdist_all"] = Field(
        "mean", description="plain mean of the selected, weights 1/d over the selected, or 1/d over all"
    )
    select: Rule = Field("nearest", description="which devices are aggregated; farthest and random are controls")
    select_fraction: float = Field(0.1, gt=0, le=1, description="fraction of the training devices that is aggregated")
    select_least: int = Field(1, ge=1, description="fewest devices of an edge that are aggregated, if so many train")
    train_fraction: float = Field(1.0, gt=0, le=1, description="fraction of the devices that trains, in place of join")
    epsilon: float = Field(
        1e-3, ge=0, description="a device stops if its last model is nearer than this to the new one; 0: never"
    )
    stop: Literal["round", "forever"] = Field("round", description="for how long a device stops")
    d_min: float = Field(1e-12, gt=0, description="devices nearer than this carry no update and are left out")
    distance_norm: DistanceNorm = Field("none", description="what distances are divided by before ranking")
    n_edges: int = Field(1, ge=1, description="edge servers; devices are assigned to them in turn")
    two_stage: bool = Field(
        False, description="devices send a distance or a projection first, and only the selected their model"
    )
    projection: int = Field(256, ge=1, description="herding: numbers in the random projection of an update")
    use: Use = Field("received", description=USE)
