"""Settings of FedPC; the defaults are what the specification binds."""

from typing import Literal

from pydantic import Field

from coterie.method import Context
from coterie.parts.prototype_groups import GroupSettings, check_groups
from coterie.parts.prototype_messages import Feature, pre_relu_layer
from coterie.parts.prototypes import ProtoLoss

TRIAL = {"gamma": 0.01}  # with the paper's 0.5 the features collapse on the battery's small task; see the method's page


class FedPCSettings(GroupSettings):
    alpha: float = Field(0.5, ge=0, description="weight of the cross-entropy")
    gamma: float = Field(0.5, ge=0, description="weight of the pull towards the prototypes")
    proto_loss: ProtoLoss = Field("batch_mean", description="what is pulled: class means of a batch, or samples")
    proto_reduce: Literal["sum", "mean"] = Field("sum", description="over the classes or samples of a batch")
    proto_repulsion: float = Field(0.0, ge=0, description="weight of a push from the other classes' prototypes")
    feature: Feature = Field("post_relu", description="where prototypes are taken")
    warmup_epochs: float = Field(0, ge=0, description="local epochs before the prototypes of the clustering")
    init_protos: Literal["clustering", "none"] = Field("clustering", description="prototypes of the first round")

    @property
    def pull(self) -> tuple[ProtoLoss, Literal["sum", "mean"], float]:
        """What prototype_loss wants to know."""
        return self.proto_loss, self.proto_reduce, self.proto_repulsion

    def check(self, ctx: Context) -> None:
        check_groups(self.J, len(ctx.clients))
        if self.feature == "pre_relu":
            pre_relu_layer(ctx)
