"""Ablations of SC-FPFL and of its mended version: each takes one step away, with its settings.

The steps are the cloud's Fourier mixing, the clusters, the agent (the edge's model is trained on cross-entropy and
taken over), or only the agent's distillation.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, EdgeId, Extras
from coterie.core.method import Phase, Settings, Upload
from coterie.core.tree import Tree
from coterie.methods.scfpfl.edges import ClusterEdges, is_agent
from coterie.methods.scfpfl.mended import SCFPFLMended
from coterie.methods.scfpfl.settings import (
    AgentSettings,
    ClusterSettings,
    FourierSettings,
    MendedAgentSettings,
    MendedClusterSettings,
    MendedWarmUpSettings,
    ScheduleSettings,
    TextFourierSettings,
    WarmUpSettings,
)
from coterie.methods.scfpfl.text import SCFPFL
from coterie.parts.variants import variant


# ---- steps taken away ------------------------------------------------------------------------------------------------
class _NoAgent(ClusterEdges):
    """The edge's model is trained on cross-entropy and taken over."""

    needs = ("public", "classes")
    card = replace(SCFPFL.card, title="SC-FPFL without agent", personal="the edge's model after local training")
    trains_own: Any = False

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, trains=is_agent, epochs=self.hp.warmup_epochs if round == 0 else None)]

    def judged(self, edge: Tree, own: Tree, data: ClientData) -> tuple[Extras, Tensor | None]:
        return {}, None

    def accept(self, agent: Tree, own: Tree, extras: Extras, data: ClientData) -> tuple[Tree, dict[str, float]]:
        return agent, {}

    def sent(self, agent: Tree, f: Tree) -> Tree:
        return agent


class _ClusterOnly(_NoAgent):
    """Without agent, and edges do not learn from each other."""

    card = replace(_NoAgent.card, title="SC-FPFL, clusters only", family="C")

    def mix(self, theta: dict[EdgeId, Tree], samples: dict[EdgeId, int], round: int) -> dict[EdgeId, Tree]:
        return {k: T.clone(w) for k, w in theta.items()}


class _FourierOnly(ClusterEdges):
    """Every client is its own edge from round 0."""

    needs = ("val", "classes")
    card = replace(SCFPFL.card, title="SC-FPFL, Fourier only", family="S,R")
    by_predictions = False

    def check(self) -> None:
        pass

    def when(self) -> str:
        return "start"

    def clusters(self, uploads: Sequence[Upload]) -> dict[ClientId, EdgeId]:
        return {u.sender: k for k, u in enumerate(uploads)}


# ---- of the text -----------------------------------------------------------------------------------------------------
class _NoAgentSettings(WarmUpSettings, ScheduleSettings, ClusterSettings, TextFourierSettings):
    pass


class _ClusterOnlySettings(WarmUpSettings, ScheduleSettings, ClusterSettings):
    pass


class _FourierOnlySettings(WarmUpSettings, TextFourierSettings, AgentSettings):
    pass


class SCFPFLNoAgent(_NoAgent, SCFPFL):
    """The text without the agent."""

    Settings: ClassVar[type[Settings]] = _NoAgentSettings


class SCFPFLClusterOnly(_ClusterOnly, SCFPFL):
    """The text with clusters only."""

    Settings: ClassVar[type[Settings]] = _ClusterOnlySettings


SCFPFLNoKL = variant(
    SCFPFL, "SCFPFLNoKL", "SC-FPFL without KL", "The text without the distillation of the agent.", kl_weight=0.0
)


class SCFPFLFourierOnly(_FourierOnly, SCFPFL):
    """The text with every client as an edge."""

    Settings: ClassVar[type[Settings]] = _FourierOnlySettings


# ---- of the mended version -------------------------------------------------------------------------------------------
class _MendedNoAgentSettings(MendedWarmUpSettings, ScheduleSettings, MendedClusterSettings, FourierSettings):
    pass


class _MendedClusterOnlySettings(MendedWarmUpSettings, ScheduleSettings, MendedClusterSettings):
    pass


class _MendedFourierOnlySettings(MendedWarmUpSettings, FourierSettings, MendedAgentSettings):
    pass


class SCFPFLMendedNoAgent(_NoAgent, SCFPFLMended):
    """The mended version without the agent."""

    Settings: ClassVar[type[Settings]] = _MendedNoAgentSettings
    card = replace(_NoAgent.card, title="SC-FPFL (mended, without agent)", certainty="O")


class SCFPFLMendedClusterOnly(_ClusterOnly, SCFPFLMended):
    """The mended version with clusters only."""

    Settings: ClassVar[type[Settings]] = _MendedClusterOnlySettings
    card = replace(_ClusterOnly.card, title="SC-FPFL (mended, clusters only)", certainty="O")


SCFPFLMendedNoKL = variant(
    SCFPFLMended, "SCFPFLMendedNoKL", "SC-FPFL (mended, without KL)",
    "The mended version without the distillation of the agent.", kl_weight=0.0,
)  # fmt: skip


class SCFPFLMendedFourierOnly(_FourierOnly, SCFPFLMended):
    """The mended version with every client as an edge."""

    Settings: ClassVar[type[Settings]] = _MendedFourierOnlySettings
    card = replace(_FourierOnly.card, title="SC-FPFL (mended, Fourier only)", certainty="O")
