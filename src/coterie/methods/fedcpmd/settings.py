"""Settings of FedCPMD's classes; docs/methods/fedcpmd.md gives the reasons for the defaults."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from coterie.core.method import Settings
from coterie.parts.gaussian import LabelEncoding, LayerScore, Normalize, Tie
from coterie.parts.idle_settings import refuse_idle
from coterie.parts.similarity import SimilarityMap

Unsampled = Literal["similarity", "cluster_mean", "keep"]


class VoteSettings(Settings):
    """Phase 1: how layers are scored, and how votes decide."""

    preparation: float = Field(
        0.3, gt=0, description="rounds of phase 1: fraction of all rounds if < 1, otherwise a number of rounds"
    )
    candidates: Literal["fc", "all", "classifier"] | list[str] = Field(
        "fc", description="layers that may become personal: linear ones, convolutions too, or names"
    )
    distance: Literal["js", "w2", "hellinger", "bhattacharyya", "js_moment", "auto", "best"] = Field(
        "js",
        description="between Gaussians; of the paper's four, auto takes the one whose votes agree most, best the one "
        "whose layers are best on validation data",
    )
    gaussian: Literal["scalar", "diag_mean"] = Field("scalar", description="one Gaussian per tensor or per column")
    fit_normalize: Normalize = Field("minmax", description="scaling of inputs and layer outputs before the fit")
    label_encoding: LabelEncoding = Field(
        "index", description="labels as numbers: y / (classes - 1), one-hot, or the class number y"
    )
    sigma_min: float = Field(1e-3, gt=0, description="floor of fitted deviations")
    score: LayerScore = Field(
        "eq7",
        description="mismatch of a layer: equation (7), (6), (6) with inputs minus labels as in the published code, or "
        "the predecessor's code",
    )
    js_sqrt: bool = Field(False, description="the root of the JS divergence instead of it")
    w2_sigma: bool = Field(True, description="false compares means only, as the predecessor's code does")
    sampler: Literal["coverage", "uniform"] = Field(
        "coverage", description="sampling of phase 1: every client once first"
    )
    vote: Literal["round", "batch"] = Field("round", description="one vote per participation or per mini-batch")
    tie: Tie = Field("mean_score", description="which of the layers with most votes wins")
    unseen: Literal["probe", "classifier", "random"] = Field("probe", description="layer for clients that never voted")
    personal_part: Literal["layer", "layer_and_classifier"] = Field(
        "layer", description="what is private: the layer voted for, or the classifier as well"
    )

    @model_validator(mode="after")
    def _used(self) -> Self:
        refuse_idle(self, "FedCPMD", self.fixed, *self.rules())
        return self

    def rules(self) -> list[tuple[str, bool, str]]:
        """Return when settings have an effect (parts/idle_settings.py)."""
        four = self.distance in ("auto", "best")
        return [
            ("js_sqrt", four or self.distance.startswith("js"), "the distance is js"),
            ("w2_sigma", four or self.distance == "w2", "the distance is w2"),
            ("gaussian", not self.score.startswith("eq6"), "the score is eq7 or absdiff"),
        ]


class SimilaritySettings(VoteSettings):
    """Phase 2: what clients are compared by."""

    similarity_payload: Literal["full", "sketch", "none"] = Field(
        "full", description="what is uploaded for the similarity: the layer, a random projection, or nothing"
    )
    sketch_dims: int = Field(64, ge=1, description="numbers in a sketch")
    phi_map: SimilarityMap = Field("clip", description="cosines to [0, 1]")

    def rules(self) -> list[tuple[str, bool, str]]:
        payload = self.similarity_payload
        return [
            *super().rules(),
            ("sketch_dims", payload == "sketch", "similarity_payload = sketch"),
            ("phi_map phi_of phi_input phi_weight", payload != "none", "similarity_payload is full or sketch"),
        ]


class FedCPMDSettings(SimilaritySettings):
    """Settings of the text."""

    phase1_personal: Literal["classifier", "voted", "none"] = Field("classifier", description="private in phase 1")
    switch_init: Literal["carry", "mean", "reset", "global"] = Field(
        "global",
        description="the classifier that becomes part of the body: own value, the mean or the initial one; "
        "global: the mean, and the personal layer starts from the shared one too",
    )
    min_participants: int = Field(
        1, ge=1, description="fewest participants of each cluster in a round, if it has that many members"
    )
    phi_of: Literal["flat", "rows"] = Field("flat", description="cosine of whole layers or mean over their rows")
    phi_input: Literal["params", "delta"] = Field(
        "params", description="of parameters or of their change since the start"
    )
    phi_weight: Literal["linear", "log"] = Field("linear", description="weight of a similarity s: s or -log(1 - s)")
    unsampled_body: Unsampled = Field("similarity", description="bodies of members that did not take part")


class FedCPMDCodeSettings(VoteSettings):
    """Settings of the published code, in which the other choices of the text are fixed."""

    score: LayerScore = Field(
        "eq6_reversed", description="mismatch of a layer: equation (6) with inputs minus labels, or another"
    )
    vote: Literal["round", "batch"] = Field("batch", description="one vote per participation or per mini-batch")
    tie: Tie = Field("fc2", description="which of the layers with most votes wins")
    phase1_personal: ClassVar[str] = "none"
    switch_init: ClassVar[str] = "global"
    similarity_payload: ClassVar[str] = "none"
    unsampled_body: ClassVar[str] = "similarity"
    min_participants: ClassVar[int] = 1
    sketch_dims: ClassVar[int] = 64
    phi_input: ClassVar[str] = "params"
    phi_map: ClassVar[str] = "clip"
    phi_of: ClassVar[str] = "flat"
    phi_weight: ClassVar[str] = "linear"


class FedCPMDMendedSettings(SimilaritySettings):
    """Settings of the mended version."""
