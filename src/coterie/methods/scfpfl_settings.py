"""The settings of SC-FPFL and its variants, by the step they belong to; numbers such as A12 are those of its page."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree as T
from coterie.errors import CoterieError
from coterie.method import Context, Settings, State
from coterie.parts.edge_tier import EdgeSettings
from coterie.parts.fourier import Layout, MaskKind, Treatment, fourier_aggregate, prrfl_window
from coterie.parts.moves import stationary
from coterie.parts.spectral import prediction_clusters
from coterie.tree import Tree

Count = Annotated[int, Field(ge=1)]


class WarmUpSettings(EdgeSettings):
    """The opening, common to all variants."""

    warmup_epochs: float = Field(5, ge=0, description="epochs of the opening, before any prediction or average (A24)")


class SpectralSettings(WarmUpSettings):
    """When and how clients are clustered."""

    cluster_when: str = Field(
        "start", pattern=r"^(start|stationary|round:[1-9]\d*)$", description="start, round:<n> or stationary (A1)"
    )
    eps1: float = Field(0.4, ge=0, description="stationary: cluster when the norm of the mean update is below (A1)")
    eps2: float = Field(1.6, ge=0, description="and the norm of the largest update above this (A1)")
    min_round: int = Field(20, ge=0, description="stationary: not up to and including this round (A1)")
    k0: Count | Literal["eigengap"] = Field("eigengap", description="first number of centres, if known (A3)")
    gap_power: float = Field(3.0, gt=0, description="eigengap: power of the similarity before counting (A3)")
    embed_dim: Count | Literal["k0", "eigengap"] = Field("k0", description="eigenvectors that embed a client (A2)")
    n_min: Count | None = Field(None, description="smallest cluster; empty: max(1, clients // (4 k0)) (A4)")
    delta_max: float = Field(0.1, ge=0, description="a cluster with a larger variance may be split (A4)")
    m_min: float = Field(0.5, ge=0, description="centres nearer than this may be merged (A4)")
    max_iter: int = Field(20, ge=1, description="steps of the refinement")
    split: Literal["axis", "all"] = Field("axis", description="split along the widest axis, or as printed (A5)")
    isodata: Literal["paper", "off"] = Field("paper", description="off: plain k-means (A6)")
    predict: Literal["softmax", "logits"] = Field("softmax", description="what predictions are (A7)")
    self_similarity: bool = Field(True, description="does the degree of a client count itself (A8)")

    def due(self, round: int) -> bool:
        when = self.cluster_when
        return when == "start" or (when.startswith("round:") and round >= int(when[6:]))

    def follows(self) -> bool:
        return self.cluster_when == "stationary"

    def triggered(self, seen: State, round: int) -> bool:
        return round > self.min_round and stationary(seen, self.eps1, self.eps2)

    def cluster(self, outputs: Tensor, seed: int) -> Tensor:
        """Labels [n] of clients by their outputs on the public set [n, items, classes]."""
        own = {k: getattr(self, k) for k in ("k0", "embed_dim", "predict", "self_similarity", "gap_power", "n_min")}
        refine = {k: getattr(self, k) for k in ("delta_max", "m_min", "max_iter", "split")}
        return prediction_clusters(outputs, seed=seed, **own, **refine, mode=self.isodata)

    def possible(self, title: str, clients: int, rounds: int) -> None:
        for name in ("k0", "embed_dim", "n_min"):
            if isinstance(value := getattr(self, name), int) and value > clients:
                raise CoterieError(f"{title}: {name} = {value} is more than the {clients} clients")
        when = self.cluster_when
        if when.startswith("round:") and int(when[6:]) > rounds:
            raise CoterieError(f"{title}: cluster_when = {when} is after the last of {rounds} rounds")


class FourierSettings(Settings):
    """How the cloud mixes the edge models."""

    g: float = Field(0.35, ge=0, le=0.5, description="share of frequencies that is low; 0 leaves the mean (A12)")
    g_schedule: Literal["const", "linear"] = Field("const", description="linear: g grows to g_last (A12)")
    g_last: float = Field(0.475, ge=0, le=0.5, description="g of the last round when it grows (A12)")
    fourier_linear: Treatment = Field("fourier", description="what happens to linear weights (A10)")
    fourier_bias: Treatment = Field("mean", description="and to biases and batch norm (A10)")
    fourier_mask: MaskKind = Field("symmetric", description="which frequencies are low (A11)")
    fourier_layout: Layout = Field("tile", description="how a kernel becomes a matrix (A13)")
    fourier_weight: Literal["uniform", "samples"] = Field("uniform", description="weight of an edge (A14)")

    def mix(self, ctx: Context, models: Sequence[Tree], samples: Sequence[int], round: int) -> list[Tree]:
        """The edges' models with common low amplitudes and their own phases; one alone stays as it is."""
        g = self.g if self.g_schedule == "const" else prrfl_window(round, ctx.rounds, self.g, self.g_last)
        weights = torch.tensor([float(n) for n in samples]) if self.fourier_weight == "samples" else None

        def treatment(name: str) -> Treatment:
            if ctx.w0[name].ndim > 1:
                return "fourier" if name in ctx.group("conv") else self.fourier_linear
            statistic = name in ctx.group("bn_stats")  # a running variance must stay positive
            return "mean" if statistic and self.fourier_bias == "fourier" else self.fourier_bias

        new = fourier_aggregate(T.stack(models), treatment, g, self.fourier_mask, self.fourier_layout, weights)
        return [T.row(new, k) for k in range(len(models))]


class AgentSettings(Settings):
    """How the edge's model becomes the client's own."""

    lambda1: float = Field(0.9, ge=0, description="the agent needs this share of the own validation accuracy (A15)")
    agent_epochs: float | None = Field(None, ge=0, description="epochs of the agent; empty: the local epochs (A15)")
    local_train_each_round: bool = Field(False, description="does the own model also train, before the agent (A16)")
    agent_fail: Literal["keep", "train"] = Field("keep", description="what the own model does instead (A16)")


class SCFPFLSettings(SpectralSettings, FourierSettings, AgentSettings):
    kl_weight: float = Field(1.0, ge=0, description="weight of the agent's distillation from the own model (A17)")
