"""Ablations of SC-FPFL (Jin, Chen, Journal of Electronics & Information Technology 45(6), 2023).

Each takes one step of the method away, with its settings: the cloud's Fourier step, the clusters, the agent (the edge's
model is trained on cross-entropy and taken over), or only the agent's distillation.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from coterie.method import Batch, ClientData, ClientId, EdgeId, Extras, Phase, Settings, Upload
from coterie.methods.scfpfl import SCFPFL
from coterie.methods.scfpfl_settings import AgentSettings, FourierSettings, SpectralSettings, WarmUpSettings
from coterie.parts.agent import agents
from coterie.parts.edge_tier import EdgesByCluster
from coterie.tree import Tree


class NoAgentSettings(SpectralSettings, FourierSettings):
    pass


class SCFPFLNoAgent(SCFPFL):
    Settings: ClassVar[type[Settings]] = NoAgentSettings
    title = "SC-FPFL without agent"
    personal_part = "the edge's model after local training"
    needs = ("public",)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, trains=agents, epochs=self.hp.warmup_epochs if round == 0 else None)]

    def accept(self, agent: Tree, own: Tree, extras: Extras, data: ClientData) -> tuple[Tree, dict[str, float]]:
        return agent, {}


class SCFPFLClusterOnly(SCFPFLNoAgent):
    Settings = SpectralSettings
    title = "SC-FPFL, clusters only"
    family = "C"

    def mix(self, theta: dict[EdgeId, Tree], samples: dict[EdgeId, int], round: int) -> dict[EdgeId, Tree]:
        return EdgesByCluster.mix(self, theta, samples, round)


class NoKLSettings(SpectralSettings, FourierSettings, AgentSettings):
    pass


class SCFPFLNoKL(SCFPFL):
    Settings = NoKLSettings
    title = "SC-FPFL without KL"

    def relearn(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.loss(params, batch, extras)


class FourierOnlySettings(WarmUpSettings, FourierSettings, AgentSettings):
    kl_weight: float = Field(1.0, ge=0, description="weight of the agent's distillation from the own model (A17)")


class SCFPFLFourierOnly(SCFPFL):
    Settings = FourierOnlySettings
    title = "SC-FPFL, Fourier only"
    family = "S,R"
    needs = ("val",)
    question = False

    def clusters(self, uploads: Sequence[Upload]) -> dict[ClientId, EdgeId]:
        """Every client is its own edge."""
        return {u.sender: k for k, u in enumerate(uploads)}
