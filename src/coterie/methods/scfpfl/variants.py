"""Ablations of SC-FPFL: each takes one step of the method away, with its settings.

The steps are the cloud's Fourier mixing, the clusters, the agent (the edge's model is trained on cross-entropy and
taken over), or only the agent's distillation.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from coterie.core import tree as T
from coterie.core.method import ClientData, ClientId, EdgeId, Extras, Phase, Settings, Tree, Upload, replace
from coterie.methods.scfpfl.method import SCFPFL, is_agent
from coterie.methods.scfpfl.settings import (
    AgentSettings,
    ClusterSettings,
    FourierSettings,
    SCFPFLSettings,
    WarmUpSettings,
)
from coterie.parts.variants import with_defaults


class NoAgentSettings(ClusterSettings, FourierSettings):
    pass


class SCFPFLNoAgent(SCFPFL):
    Settings: ClassVar[type[Settings]] = NoAgentSettings
    needs = ("public", "classes")
    card = replace(SCFPFL.card, title="SC-FPFL without agent", personal="the edge's model after local training")

    trains_own = False

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, trains=is_agent, epochs=self.hp.warmup_epochs if round == 0 else None)]

    def judged(self, edge: Tree, own: Tree, data: ClientData) -> tuple[Extras, Tensor | None]:
        return {}, None

    def accept(self, agent: Tree, own: Tree, extras: Extras, data: ClientData) -> tuple[Tree, dict[str, float]]:
        return agent, {}

    def sent(self, agent: Tree, kept: Tree) -> Tree:
        return agent


class SCFPFLClusterOnly(SCFPFLNoAgent):
    Settings = ClusterSettings
    card = replace(SCFPFLNoAgent.card, title="SC-FPFL, clusters only", family="C")

    def mix(self, theta: dict[EdgeId, Tree], samples: dict[EdgeId, int], round: int) -> dict[EdgeId, Tree]:
        return {k: T.clone(w) for k, w in theta.items()}


class SCFPFLNoKL(SCFPFL):
    Settings = with_defaults(SCFPFLSettings, kl_weight=0.0)
    card = replace(SCFPFL.card, title="SC-FPFL without KL")


class FourierOnlySettings(WarmUpSettings, FourierSettings, AgentSettings):
    pass


class SCFPFLFourierOnly(SCFPFL):
    """Every client is its own edge from round 0 on."""

    Settings = FourierOnlySettings
    needs = ("val", "classes")
    card = replace(SCFPFL.card, title="SC-FPFL, Fourier only", family="S,R")
    by_predictions = False

    def check(self) -> None:
        pass

    def when(self) -> str:
        return "start"

    def clusters(self, uploads: Sequence[Upload]) -> dict[ClientId, EdgeId]:
        return {u.sender: k for k, u in enumerate(uploads)}
