"""Settings of FedPC and of its mended version; docs/methods/fedpc.md gives the reasons for the defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coterie.core.method import Settings
from coterie.methods.fedpc.clustering import Missing
from coterie.methods.fedpc.mixing import GroupMap
from coterie.methods.fedpc.prototypes import Feature
from coterie.parts.keep_best import USE, Use
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
    init_protos: Literal["clustering", "none"] = Field("clustering", description="prototypes of the first round")
    sim_map: GroupMap = Field("clip", description="cosines of groups to weights")
    inter: Literal["adaptive", "mean", "none"] = Field("adaptive", description="mixing across groups")


class FedPCSettings(GroupSettings, ReadingSettings):
    """Settings of the text; `reading = code` presets the loss of the framework that it was evaluated in."""

    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "text": {},
        "code": {"proto_loss": "mse", "proto_reduce": "mean", "init_protos": "none"},
    }
    reading: Literal["text", "code"] = Field("text", description="the printed loss, or that of the framework")
    alpha: float = Field(0.5, ge=0, description="weight of the cross-entropy")
    gamma: float = Field(0.5, ge=0, description="weight of the pull towards the prototypes")
    proto_loss: ProtoLoss = Field("batch_mean", description="what is pulled: class means of a batch, or samples")
    proto_reduce: Literal["sum", "mean"] = Field("sum", description="over the classes or samples of a batch")
    proto_repulsion: float = Field(0.0, ge=0, description="weight of a push from the other classes' prototypes")


class FedPCMendedSettings(GroupSettings):
    """Settings of the contrast."""

    alpha: float = Field(1.0, ge=0, description="weight of the cross-entropy")
    gamma: float = Field(0.5, ge=0, description="weight of the contrast")
    tau: float = Field(0.5, gt=0, description="temperature of the cosines")
    rehearsal: float = Field(0.05, ge=0, description="weight of the classifier's cross-entropy on received prototypes")
    init_protos: Literal["clustering", "none"] = Field("none", description="prototypes of the first round")
    use: Use = Field("best", description=USE)
