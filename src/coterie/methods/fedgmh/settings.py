"""Settings of FedGMH and of its mended version; docs/methods/fedgmh.md gives the reasons for the defaults."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from coterie.core.method import Settings
from coterie.parts.idle_settings import refuse_idle
from coterie.parts.readings import ReadingSettings


class FeatureSettings(Settings):
    """Clients' models, the features they send, and the server's training on them."""

    init: Literal["shared", "independent"] = Field(
        "shared", description="whether clients and heads start from the same random model, or each from its own"
    )
    eta_h: float = Field(1.0, gt=0, description="learning rate of the server's heads")
    server_steps: int = Field(1, ge=0, description="passes of the server over the received features per round")
    server_batch: int = Field(0, ge=0, description="features per step of one head; 0: all")
    head_weight_decay: float = Field(0.0, ge=0, description="weight decay of the server's heads")
    feature_norm: Literal["none", "l2"] = Field("none", description="l2: received features are scaled to length one")

    def server_rule(self) -> tuple[str, bool, str]:
        """Return when the settings of the server's training have an effect (parts/idle_settings.py)."""
        names = "eta_h server_batch head_weight_decay feature_norm"
        return names, self.server_steps > 0, "server_steps is above 0"


class FedGMHSettings(FeatureSettings, ReadingSettings):
    """Settings of the text; `reading = code` presets what the published code does differently."""

    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "code": {
            "written": "others", "criticality": "square", "mask_scope": "tensor", "first_psi": "ones",
            "received_share": 1.0, "score": "received", "decay_on": "participation", "server_batch": 1,
        },
    }  # fmt: skip
    reading: Literal["paper", "code"] = Field("paper", description="the text, or the published code")
    score: Literal["own", "received"] = Field(
        "own", description="model that is scored: as training left it, or with the received head written in"
    )
    heads: Literal["per_label", "one"] = Field("per_label", description="heads of the server: one per label, or one")
    download: Literal["own", "all"] = Field("own", description="heads that a client is sent: of its labels, or all")
    write: Literal["mask", "average", "whole"] = Field(
        "mask", description="how the received head is written in: some entries, averaged with the own head, or all"
    )
    beta: float = Field(0.5, ge=0, le=1, description="fraction of the head's entries that are critical")
    criticality: Literal["product", "square"] = Field(
        "product", description="criticality of an entry: |change x value|, or change squared x value (published code)"
    )
    mask_scope: Literal["head", "tensor"] = Field("head", description="rank weight and bias together or separately")
    written: Literal["critical", "others"] = Field("critical", description="mask: entries that take the received value")
    first_psi: Literal["none", "ones"] = Field("none", description="mask of a client that has not trained yet")
    received_share: float = Field(0.5, ge=0, le=1, description="average: weight of the received head")
    decay_on: Literal["round", "participation"] = Field("round", description="what lr_decay counts (exact for SGD)")

    @model_validator(mode="after")
    def _used(self) -> Self:
        refuse_idle(
            self, "FedGMH", self.preset(self.reading), self.server_rule(),
            ("beta criticality mask_scope written first_psi", self.write == "mask", "write = mask"),
            ("mask_scope", self.criticality == "product", "criticality = product"),
            ("received_share", self.write == "average", "write = average"),
            ("download", self.heads == "per_label", "heads = per_label"),
        )  # fmt: skip
        return self


class FedGMHMendedSettings(FeatureSettings):
    """Settings of the common head."""

    server_steps: int = Field(10, ge=0, description="passes of the server over the received features per round")
    received_share: float = Field(0.5, ge=0, le=1, description="weight of the received rows; the rest is the own head")

    @model_validator(mode="after")
    def _used(self) -> Self:
        refuse_idle(self, "FedGMH mended", {}, self.server_rule())
        return self
