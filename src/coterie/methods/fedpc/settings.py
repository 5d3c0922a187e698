"""Settings of FedPC; docs/methods/fedpc.md gives the reasons for the defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coterie.methods.fedpc.clustering import Missing
from coterie.methods.fedpc.mixing import GroupMap
from coterie.methods.fedpc.prototypes import Feature
from coterie.parts.keep_best import USE, Use
from coterie.parts.prototypes import ProtoLoss
from coterie.parts.readings import ReadingSettings


class FedPCSettings(ReadingSettings):
    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "alpha": 0.5, "proto_loss": "batch_mean", "proto_reduce": "sum", "init_protos": "clustering",
            "rehearsal": 0.0,
        },
        "code": {
            "alpha": 0.5, "proto_loss": "mse", "proto_reduce": "mean", "init_protos": "none", "rehearsal": 0.0,
        },
        "mended": {
            "alpha": 1.0, "proto_loss": "contrast", "proto_reduce": "mean", "init_protos": "none", "rehearsal": 0.05,
            "use": "best",
        },
    }  # fmt: skip
    reading: Literal["paper", "code", "mended"] = Field(
        "mended", description="the text, the framework it was evaluated in, or a contrast that cannot collapse"
    )

    # the client's loss
    alpha: float = Field(0.5, ge=0, description="weight of the cross-entropy")
    gamma: float = Field(0.5, ge=0, description="weight of the pull towards the prototypes")
    proto_loss: ProtoLoss | Literal["contrast"] = Field(
        "batch_mean", description="what is pulled: class means of a batch, samples, or samples and away from others"
    )
    proto_reduce: Literal["sum", "mean"] = Field("sum", description="over the classes or samples of a batch")
    tau: float = Field(0.5, gt=0, description="contrast: temperature of the cosines")
    rehearsal: float = Field(0.0, ge=0, description="weight of the classifier's cross-entropy on received prototypes")
    proto_repulsion: float = Field(0.0, ge=0, description="weight of a push from the other classes' prototypes")
    feature: Feature = Field("post_relu", description="where prototypes are taken")

    # how clients are grouped
    J: int | None = Field(None, ge=1, description="number of groups; empty: chosen by silhouette")
    J_max: int = Field(10, ge=2, description="largest number of groups to choose from")
    pca: Annotated[float, Field(gt=0)] | Annotated[int, Field(ge=1)] | Literal["none"] = Field(
        0.95, description="fraction of variance, or number of components"
    )
    missing: Missing = Field("zero", description="absent classes in the clustering")
    grouping: Literal["prototypes", "random"] = Field("prototypes", description="random: same sizes, as a control")
    warmup_epochs: float = Field(0, ge=0, description="local epochs before the prototypes of the clustering")
    init_protos: Literal["clustering", "none"] = Field("clustering", description="prototypes of the first round")

    # how groups learn from each other
    sim_map: GroupMap = Field("clip", description="cosines of groups to weights")
    inter: Literal["adaptive", "mean", "none"] = Field("adaptive", description="mixing across groups")
    use: Use = Field("received", description=USE)
