"""Settings of FedPC and of its mended version; docs/methods/fedpc.md gives the reasons for the defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from coterie.core.method import Settings
from coterie.methods.fedpc.clustering import Missing
from coterie.methods.fedpc.mixing import GroupMap
from coterie.methods.fedpc.prototypes import Feature
from coterie.parts.idle_settings import refuse_idle
from coterie.parts.prototypes import ProtoLoss
from coterie.parts.readings import ReadingSettings


class GroupSettings(Settings):
    """How clients are grouped, and how groups learn from each other."""

    feature: Feature = Field("post_relu", description="where prototypes are taken")
    J: int | None = Field(None, ge=1, description="number of groups; empty: chosen by silhouette")
    J_max: int = Field(10, ge=2, description="largest number of groups to choose from")
    pca: Annotated[float, Field(gt=0)] | Annotated[int, Field(ge=1)] | Literal["none"] = Field(
        0.95, description="fraction of variance, or number of components"
    )
    missing: Missing = Field("zero", description="absent classes in the clustering")
    grouping: Literal["prototypes", "random"] = Field("prototypes", description="random: same sizes, as a control")
    warmup_epochs: float = Field(0, ge=0, description="local epochs before the prototypes of the clustering")
    init_protos: Literal["clustering", "none"] = Field("none", description="prototypes of the first round")
    sim_map: GroupMap = Field("clip", description="cosines of groups to weights")
    inter: Literal["adaptive", "mean", "none"] = Field("adaptive", description="mixing across groups")

    def group_rules(self) -> list[tuple[str, bool, str]]:
        """Return when the settings of groups have an effect (parts/idle_settings.py)."""
        return [
            ("J_max", self.J is None, "J is empty"),
            ("pca missing grouping inter sim_map", self.J != 1, "there are several groups"),
            ("sim_map", self.inter == "adaptive", "inter = adaptive"),
        ]


class FedPCSettings(GroupSettings, ReadingSettings):
    """Settings of the paper; `reading = text` presets the printed loss."""

    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "text": {"proto_loss": "batch_mean", "proto_reduce": "sum", "init_protos": "clustering"},
    }
    reading: Literal["paper", "text"] = Field(
        "paper", description="a squared error as the pull, which can be trained; or the loss as printed, which cannot"
    )
    alpha: float = Field(0.5, ge=0, description="weight of the cross-entropy")
    gamma: float = Field(0.5, ge=0, description="weight of the pull towards the prototypes")
    proto_loss: ProtoLoss = Field("mse", description="what is pulled: class means of a batch, or samples")
    proto_reduce: Literal["sum", "mean"] = Field("mean", description="over the classes or samples of a batch")
    proto_repulsion: float = Field(0.0, ge=0, description="weight of a push from the other classes' prototypes")

    @model_validator(mode="after")
    def _used(self) -> Self:
        pull = ("proto_loss proto_reduce proto_repulsion", self.gamma > 0, "gamma is above 0")
        refuse_idle(self, "FedPC", self.preset(self.reading), pull, *self.group_rules())
        return self


class FedPCMendedSettings(GroupSettings):
    """Settings of the contrast."""

    alpha: float = Field(1.0, ge=0, description="weight of the cross-entropy")
    gamma: float = Field(0.5, ge=0, description="weight of the contrast")
    tau: float = Field(0.5, gt=0, description="temperature of the cosines")
    rehearsal: float = Field(0.05, ge=0, description="weight of the classifier's cross-entropy on received prototypes")

    @model_validator(mode="after")
    def _used(self) -> Self:
        refuse_idle(self, "FedPC mended", {}, ("tau", self.gamma > 0, "gamma is above 0"), *self.group_rules())
        return self
