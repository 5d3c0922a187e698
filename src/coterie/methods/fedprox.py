"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020 (arXiv 1812.06127).

FedAvg with a pull of the local model towards the one received: loss + mu/2 ||w - w_t||^2 over all parameters.
Batch-norm statistics are not penalised. Variable local work is a setting of the run (stragglers), not of the method.
"""

from pydantic import Field

from coterie.core.context import ClientData, State
from coterie.core.method import Card, Method, Phase, Settings, Start, TaskLoss
from coterie.core.tree import Tree


class FedProxSettings(Settings):
    mu: float = Field(0.01, ge=0, description="strength of the pull towards the received model")


class FedProx(Method):
    Settings = FedProxSettings
    hp: FedProxSettings
    card = Card("FedProx", "Li et al., MLSys 2020, arXiv 1812.06127", 2020, "G,R", certainty="B")

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        return start.adding(anchor=start.params)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(TaskLoss(self.ctx, pull=self.hp.mu))] if round > 0 else []
