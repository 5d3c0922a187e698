"""Settings of FedGMH; docs/methods/fedgmh.md gives the reasons for the defaults."""

from typing import Literal

from pydantic import Field

from coterie.method import Settings


class FedGMHSettings(Settings):
    # clients
    beta: float = Field(0.5, ge=0, le=1, description="share of the head's entries that are critical")
    mask_scope: Literal["head", "tensor"] = Field("head", description="rank weight and bias together or apart")
    write: Literal["mask", "average"] = Field("mask", description="average: half own, half received head (GMH-a)")
    first_psi: Literal["none", "ones"] = Field("none", description="mask of a client that has not trained yet")
    init: Literal["shared", "independent"] = Field("shared", description="do clients start from the same model")
    decay_on: Literal["round", "participation"] = Field("round", description="what lr_decay counts (exact for SGD)")

    # what travels
    heads: Literal["per_label", "one"] = Field("per_label", description="one: a single head for all labels (GMH-o)")
    download: Literal["own", "all"] = Field("own", description="heads a client is sent: of its own labels, or all")
    feature_weight: Literal["uniform", "samples"] = Field("uniform", description="samples: counts are sent and weigh")

    # server
    eta_h: float = Field(1.0, gt=0, description="rate of the server's training of the heads")
    server_steps: int = Field(1, ge=0, description="passes of the server over the received features per round")
    server_batch: int = Field(0, ge=0, description="features of one head per step; 0: all")
    head_weight_decay: float = Field(0.0, ge=0, description="weight decay of the server's heads")
    feature_norm: Literal["none", "l2"] = Field("none", description="l2: received features are scaled to length one")
