"""FedBN. Li, Jiang, Zhang, Kamp, Dou, ICLR 2021 (arXiv 2102.07623).

Batch-norm layers (affine and running statistics) stay on the client, all other layers are averaged; all are trained.
A client that has never trained starts from the initial batch norm and is scored with statistics of its own data.
The mean is by samples, so that without batch norm it would be FedAvg; the authors' clients are of equal size.
"""

from pydantic import Field

from coterie.core.context import ClientData, State
from coterie.core.method import Card, Method, Model, Settings, Trained, Upload
from coterie.core.tree import Tree
from coterie.parts.batch_norm import recalibrated


class FedBNSettings(Settings):
    recalibrate: bool = Field(
        True, description="evaluate clients that never trained with batch-norm statistics of their own data"
    )


class FedBN(Method):
    Settings = FedBNSettings
    hp: FedBNSettings
    card = Card("FedBN", "Li et al., ICLR 2021, arXiv 2102.07623", 2021, "S", personal="batch norm")
    needs = ("bn",)
    unlabelled = True

    def private(self, name: str) -> bool:
        return name in self.ctx.group("bn")

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return ({**state, "trained": True} if state else state), upload

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        params, extras = super().personal(state, download, data)
        if self.hp.recalibrate and not state.get("trained"):
            params = recalibrated(self.ctx.net, params, data.train.x)
        return Model(params, extras)
