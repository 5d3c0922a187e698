"""Settings of FedGMH; docs/methods/fedgmh.md gives the reasons for the defaults."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from coterie.parts.readings import ReadingSettings


class FedGMHSettings(ReadingSettings):
    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "heads": "per_label", "write": "mask", "written": "critical", "criticality": "product",
            "mask_scope": "head", "first_psi": "none", "received_share": 0.5, "score": "own", "decay_on": "round",
            "server_batch": 0, "server_steps": 1,
        },
        "code": {
            "heads": "per_label", "write": "mask", "written": "others", "criticality": "square",
            "mask_scope": "tensor", "first_psi": "ones", "received_share": 1.0, "score": "received",
            "decay_on": "participation", "server_batch": 1, "server_steps": 1,
        },
        "mended": {
            "heads": "common", "write": "average", "received_share": 0.5, "score": "best", "server_batch": 0,
            "server_steps": 10,
        },
    }  # fmt: skip
    reading: Literal["paper", "code", "mended"] = Field(
        "mended", description="the text, the authors' code, or one head trained without interference of labels"
    )
    score: Literal["own", "received", "best"] = Field(
        "own",
        description="model that is scored: as training left it, with the received head written in, or the best "
        "that training left so far, by validation data",
    )

    # clients
    beta: float = Field(0.5, ge=0, le=1, description="fraction of the head's entries that are critical")
    mask_scope: Literal["head", "tensor"] = Field("head", description="rank weight and bias together or separately")
    criticality: Literal["product", "square"] = Field(
        "product", description="of an entry: |change x value|, or change squared x value as in the authors' code"
    )
    write: Literal["mask", "average", "whole"] = Field(
        "mask", description="how the received head is written in: some entries, averaged with the own (GMH-a), or all"
    )
    written: Literal["critical", "others"] = Field("critical", description="mask: entries that take the received value")
    received_share: float = Field(0.5, ge=0, le=1, description="average: fraction of the received head")
    first_psi: Literal["none", "ones"] = Field("none", description="mask of a client that has not trained yet")
    init: Literal["shared", "independent"] = Field("shared", description="whether clients start from the same model")
    decay_on: Literal["round", "participation"] = Field("round", description="what lr_decay counts (exact for SGD)")

    # what travels
    heads: Literal["per_label", "one", "common"] = Field(
        "per_label",
        description="of the server: one per label, a single one (GMH-o), or a single one that is trained on each "
        "client's labels only and of which only their rows travel",
    )
    download: Literal["own", "all"] = Field("own", description="heads a client is sent: of its own labels, or all")
    feature_weight: Literal["uniform", "samples"] = Field("uniform", description="samples: counts are sent and weigh")

    # server
    eta_h: float = Field(1.0, gt=0, description="rate of the server's training of the heads")
    server_steps: int = Field(1, ge=0, description="passes of the server over the received features per round")
    server_batch: int = Field(0, ge=0, description="features of one head per step; 0: all")
    head_weight_decay: float = Field(0.0, ge=0, description="weight decay of the server's heads")
    feature_norm: Literal["none", "l2"] = Field("none", description="l2: received features are scaled to length one")
