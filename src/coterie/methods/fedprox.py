"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020 (arXiv 1812.06127).

FedAvg with a pull of the local model towards the one received: loss + mu/2 ||w - w_t||^2 over all parameters.
Batch-norm statistics are not penalised. Variable local work is a setting of the run (stragglers), not of the method.
"""

from pydantic import Field
from torch import Tensor

from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Method, Phase, Settings, Start, TaskLoss, unless_overridden
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
        return [Phase(unless_overridden(self, FedProx, "loss", self._pulled))] if round > 0 else []

    @property
    def _pulled(self) -> TaskLoss:
        return TaskLoss(self.ctx, pull=self.hp.mu)

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self._pulled(params, batch, extras)
