"""Settings of ECS-FL and of its mended version; docs/methods/ecs-fl.md gives the reasons for the defaults."""

from typing import Literal, Self

from pydantic import Field, model_validator

from coterie.core.method import Settings
from coterie.methods.ecsfl.selection import DistanceNorm, Rule
from coterie.parts.idle_settings import refuse_idle


class DeviceSettings(Settings):
    """Devices and edges: which devices train and stop, and how many are aggregated."""

    select_fraction: float = Field(0.1, gt=0, le=1, description="fraction of the training devices that is aggregated")
    select_least: int = Field(1, ge=1, description="fewest devices of an edge that are aggregated, if as many train")
    train_fraction: float | None = Field(
        None, gt=0, le=1, description="fraction of the devices that trains, in place of join; empty: join"
    )
    epsilon: float = Field(
        1e-3, ge=0, description="a device stops if its last model is nearer than this to the new one; 0: never"
    )
    stop: Literal["round", "forever"] = Field("round", description="for how long a device stops")
    d_min: float = Field(1e-12, gt=0, description="devices nearer than this carry no update and are left out")
    n_edges: int = Field(1, ge=1, description="edge servers; devices are assigned to them in turn")

    @model_validator(mode="after")
    def _used(self) -> Self:
        refuse_idle(self, "ECS-FL", {}, *self.rules())
        return self

    def rules(self) -> list[tuple[str, bool, str]]:
        """Return when settings have an effect (parts/idle_settings.py)."""
        return [("stop", self.epsilon > 0, "epsilon is above 0")]


class ECSFLSettings(DeviceSettings):
    """Settings of the text."""

    aggregation: Literal["mean", "invdist", "invdist_all"] = Field(
        "mean", description="plain mean of the selected, weights 1/d over the selected, or 1/d over all"
    )
    select: Rule = Field("nearest", description="which devices are aggregated; farthest and random are controls")
    distance_norm: DistanceNorm = Field("none", description="what distances are divided by before ranking")
    two_stage: bool = Field(False, description="devices send their distance first, and only the selected their model")

    def rules(self) -> list[tuple[str, bool, str]]:
        selects, weighs = self.aggregation != "invdist_all", self.aggregation != "mean"
        ranks = selects and self.select_fraction < 1
        measures = weighs or (ranks and self.select != "random")
        return [
            *super().rules(),
            ("select_fraction select_least two_stage", selects, "aggregation = mean or invdist"),
            ("select", ranks, "a part of the devices is selected"),
            ("distance_norm", measures, "devices are ranked or weighed by distance"),
        ]


class MendedDeviceSettings(DeviceSettings):
    """Settings of the mended version and of its controls."""

    select_least: int = Field(8, ge=1, description="fewest devices of an edge that are aggregated, if as many train")


class ECSFLMendedSettings(MendedDeviceSettings):
    """Settings of herding."""

    projection: int = Field(256, ge=1, description="numbers in the random projection of an update")
