"""Settings of FedCPMD; docs/methods/fedcpmd.md gives the reasons for the defaults."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from coterie.parts.gaussian import Normalize, Score, Tie
from coterie.parts.keep_best import USE, Use
from coterie.parts.readings import ReadingSettings
from coterie.parts.similarity import SimilarityMap

Unsampled = Literal["similarity", "cluster_mean", "keep"]


class FedCPMDSettings(ReadingSettings):
    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "phase1_personal": "classifier", "personal_part": "layer", "shared_by": "cluster",
            "switch_init": "global", "min_participants": 5,
            "phi_of": "flat", "phi_input": "params", "phi_weight": "linear",
        },
        "code": {
            "phase1_personal": "none", "personal_part": "layer", "shared_by": "cluster",
            "switch_init": "global", "min_participants": 1, "relay": True, "vote": "batch", "tie": "fc2",
            "similarity_payload": "none", "phi_of": "flat", "phi_input": "params", "phi_weight": "linear",
        },
        "mended": {
            "phase1_personal": "none", "personal_part": "layer", "shared_by": "all",
            "switch_init": "global", "min_participants": 1,
            "phi_of": "rows", "phi_input": "delta", "phi_weight": "log", "use": "best",
        },
    }  # fmt: skip
    reading: Literal["paper", "code", "mended"] = Field(
        "mended",
        description="the text, the published code, or a switch at which nothing private becomes shared",
    )

    preparation: float = Field(
        0.3, gt=0, description="rounds of phase 1: fraction of all rounds if < 1, otherwise a number of rounds"
    )

    # how a layer is scored
    candidates: Literal["fc", "all", "classifier"] | list[str] = Field(
        "fc", description="layers that may become personal: linear ones, convolutions too, or names"
    )
    distance: Literal["js", "w2", "hellinger", "bhattacharyya", "js_moment", "auto"] = Field(
        "js", description="between Gaussians; auto takes the one of the paper's four whose votes agree most"
    )
    gaussian: Literal["scalar", "diag_mean"] = Field("scalar", description="one Gaussian per tensor or per column")
    fit_normalize: Normalize = Field("minmax", description="scaling of inputs and layer outputs before the fit")
    label_encoding: Literal["index", "onehot"] = Field("index", description="labels as numbers")
    sigma_min: float = Field(1e-3, gt=0, description="floor of fitted deviations")
    score: Score = Field("eq7", description="mismatch of a layer: equation (7) or the predecessor's code")
    js_sqrt: bool = Field(False, description="the root of the JS divergence instead of it")
    w2_sigma: bool = Field(True, description="false compares means only, as the predecessor's code does")

    # phase 1 and the switch
    sampler: Literal["coverage", "uniform"] = Field(
        "coverage", description="sampling of phase 1: every client once first"
    )
    vote: Literal["round", "batch"] = Field("round", description="one vote per participation or per mini-batch")
    tie: Tie = Field("mean_score", description="which of the layers with most votes wins")
    unseen: Literal["probe", "classifier", "random"] = Field("probe", description="layer for clients that never voted")
    phase1_personal: Literal["classifier", "voted", "none"] = Field("classifier", description="private in phase 1")
    switch_init: Literal["carry", "mean", "reset", "global"] = Field(
        "carry",
        description="the classifier that becomes part of the body: own value, the mean or the initial one; "
        "global: the mean, and the personal layer starts from the shared one too",
    )

    # phase 2
    personal_part: Literal["layer", "layer_and_classifier"] = Field(
        "layer", description="what is private: the layer voted for, or the classifier as well"
    )
    shared_by: Literal["cluster", "all"] = Field(
        "cluster",
        description="clients over which a layer is averaged: those with the same personal layer, or all that share it",
    )
    min_participants: int = Field(
        1, ge=1, description="fewest participants of each cluster in a round, if it has that many members"
    )
    relay: bool = Field(
        False,
        description="one participant per round (of each cluster in phase 2): models are passed on, never averaged",
    )
    similarity_payload: Literal["full", "sketch", "none"] = Field(
        "full", description="what is uploaded for the similarity: the layer, a random projection, or nothing"
    )
    sketch_dims: int = Field(64, ge=1, description="numbers in a sketch")
    phi_map: SimilarityMap = Field("clip", description="cosines to [0, 1]")
    phi_of: Literal["flat", "rows"] = Field("flat", description="cosine of whole layers or mean over their rows")
    phi_input: Literal["params", "delta"] = Field(
        "params", description="of parameters or of their change since the start"
    )
    phi_weight: Literal["linear", "log"] = Field("linear", description="weight of a similarity s: s or -log(1 - s)")
    use: Use = Field("received", description=USE)
    unsampled_body: Unsampled = Field("similarity", description="bodies of members that did not take part")
