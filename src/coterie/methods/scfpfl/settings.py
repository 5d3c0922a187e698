"""Settings of SC-FPFL and of its mended version, by the step that they belong to.

A variant without a step does not have its settings. docs/methods/sc-fpfl.md gives the reasons for the defaults.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coterie.core.method import Settings
from coterie.parts.fourier import MaskKind, MatrixLayout, Treatment
from coterie.parts.idle_settings import refuse_idle

Count = Annotated[int, Field(ge=1)]


class StepSettings(Settings):
    """Settings of a step. A setting that other settings switch off cannot be given another value than its default."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        def given(name: str, *values: object) -> bool:
            return getattr(self, name, None) in values

        refuse_idle(
            self, "SC-FPFL", {},
            ("eps1 eps2 min_round", given("cluster_when", "stationary"), "cluster_when = stationary"),
            ("g_last", given("g_schedule", "linear"), "g_schedule = linear"),
            ("gap_power", "eigengap" in (getattr(self, "k0", ""), getattr(self, "embed_dim", "")),
             "k0 or embed_dim = eigengap"),
            ("n_min delta_max max_iter split", not given("isodata", "off"), "isodata = paper or classic"),
            ("m_min", given("isodata", "classic"), "isodata = classic"),
            ("agent_fail", not given("local_train_each_round", True), "local_train_each_round = false"),
        )  # fmt: skip
        return self


class ScheduleSettings(StepSettings):
    """When clients are clustered."""

    cluster_when: str = Field(
        "start", pattern=r"^(start|stationary|round:[1-9]\d*)$", description="start, round:<n> or stationary"
    )
    eps1: float = Field(0.4, ge=0, description="stationary: cluster when the norm of the mean update is below this")
    eps2: float = Field(1.6, ge=0, description="and the norm of the largest update above this")
    min_round: int = Field(20, ge=0, description="stationary: not up to and including this round")


class FourierSettings(StepSettings):
    """How the cloud mixes the edge models."""

    g: float = Field(0.35, ge=0, le=0.5, description="fraction of frequencies that is low; 0 leaves the mean")
    g_schedule: Literal["const", "linear"] = Field("const", description="linear: g grows to g_last")
    g_last: float = Field(0.475, ge=0, le=0.5, description="g of the last round when it grows")
    fourier_linear: Treatment | Literal["auto"] = Field(
        "fourier", description="treatment of linear weights; auto: keep if the model has convolutions, else fourier"
    )
    fourier_bias: Treatment = Field("mean", description="treatment of biases and batch norm")
    fourier_mask: MaskKind = Field("symmetric", description="which frequencies are low")
    fourier_layout: MatrixLayout = Field("tile", description="how a kernel becomes a matrix")
    fourier_weight: Literal["uniform", "samples"] = Field("uniform", description="weight of an edge")


# ---- the text --------------------------------------------------------------------------------------------------------
class WarmUpSettings(StepSettings):
    """Round 0, and what is scored."""

    score: Literal["own", "edge"] = Field("own", description="whose model is scored: the client's or its edge's")
    warmup_epochs: float = Field(5, ge=0, description="epochs of round 0, before any prediction or average")


class ClusterSettings(StepSettings):
    """How clients are clustered by their predictions."""

    predict: Literal["softmax", "logits"] = Field("softmax", description="form of the predictions")
    self_similarity: bool = Field(True, description="whether the degree of a client counts itself")
    k0: Count | Literal["eigengap"] = Field(
        "eigengap", description="first number of centres; eigengap: found in the eigenvalues"
    )
    gap_power: float = Field(3.0, gt=0, description="eigengap: power of the similarity before counting")
    embed_dim: Count | Literal["k0", "eigengap"] = Field("k0", description="eigenvectors that embed a client")
    isodata: Literal["paper", "classic", "off"] = Field(
        "paper", description="classic: also between the paper's bounds, splits and merges in turn; off: plain k-means"
    )
    n_min: Count | None = Field(None, description="smallest cluster; empty: max(1, clients // (4 k0))")
    delta_max: float = Field(0.1, ge=0, description="a cluster with a larger variance may be split")
    m_min: float = Field(0.5, ge=0, description="classic: centres nearer than this may be merged")
    max_iter: int = Field(20, ge=1, description="steps of the refinement")
    split: Literal["axis", "all"] = Field(
        "all", description="all: the variance is added to every coordinate, as printed; axis: a deviation along one"
    )


class TextFourierSettings(FourierSettings):
    """How the cloud mixes the edge models: convolution weights only, as the text says."""

    fourier_linear: Treatment | Literal["auto"] = Field(
        "auto", description="treatment of linear weights; auto: keep if the model has convolutions, else fourier"
    )
    fourier_bias: Treatment = Field("keep", description="treatment of biases and batch norm")


class AgentSettings(StepSettings):
    """How the edge's model becomes the client's own."""

    lambda1: float = Field(0.9, ge=0, description="the agent needs this fraction of the own validation accuracy")
    agent_epochs: float | None = Field(None, ge=0, description="epochs of the agent; empty: the local epochs")
    local_train_each_round: bool = Field(
        False, description="whether the own model also trains in every round, before the agent; false: only in round 0"
    )
    agent_fail: Literal["keep", "train"] = Field("keep", description="what the own model does if its agent fails")
    kl_weight: float = Field(1.0, ge=0, description="weight of the agent's distillation from the own model")


class SCFPFLSettings(WarmUpSettings, ScheduleSettings, ClusterSettings, TextFourierSettings, AgentSettings):
    """Settings of the text."""


# ---- the mended version ----------------------------------------------------------------------------------------------
class MendedWarmUpSettings(WarmUpSettings):
    """Round 0, and what is scored."""

    warmup_epochs: float = Field(20, ge=0, description="epochs of round 0, before any prediction or average")


class MendedClusterSettings(StepSettings):
    """How clients are clustered."""

    k0: Count | Literal["modularity"] = Field(
        "modularity", description="number of clusters; modularity: the division that is best by it, or none"
    )


class MendedAgentSettings(StepSettings):
    """How the agent learns from the client's own model."""

    agent_epochs: float | None = Field(None, ge=0, description="epochs of the agent; empty: the local epochs")
    kl_weight: float = Field(1.0, ge=0, description="weight of the agent's distillation from the own model")


class SCFPFLMendedSettings(
    MendedWarmUpSettings, ScheduleSettings, MendedClusterSettings, FourierSettings, MendedAgentSettings
):
    """Settings of the mended version."""
