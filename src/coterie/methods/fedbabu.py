"""FedBABU. Oh, Kim, Yun, ICLR 2022 (arXiv 2106.06042).

Only the body is trained and averaged; the head keeps its random initial values, the same for all clients, for the whole
run. A client gets its own model by fine-tuning a copy before it is used (the view `adapted`); the copy never feeds
back. The head never travels: every process knows the initial model.
Fine-tuning uses the run's rate by default, as the paper's text does (`finetune_lr`: 0.001 in the authors' code, whose
federation ends at a rate that has been divided by 100).
"""

from typing import Literal

from pydantic import Field

from coterie.core import tree as T
from coterie.core.context import State
from coterie.core.method import Card, Method, Phase, Settings
from coterie.core.tree import Tree


class FedBABUSettings(Settings):
    finetune_epochs: float = Field(5, ge=0, description="epochs of fine-tuning before scoring")
    finetune: Literal["all", "head"] = Field("all", description="what fine-tuning changes")
    finetune_lr: float | None = Field(None, gt=0, description="rate of fine-tuning; empty: the run's")


class FedBABU(Method):
    Settings = FedBABUSettings
    hp: FedBABUSettings
    card = Card(
        "FedBABU", "Oh et al., ICLR 2022, arXiv 2106.06042", 2022, "S,F", personal="the whole model, by fine-tuning"
    )
    needs = ("head",)
    weighting = "uniform"

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, lambda name: not self.private(name))]

    def global_model(self, server: State) -> Tree | None:
        whole = {**server["w"], **T.keep(self.ctx.w0, self.private)}
        return whole if whole.keys() == self.ctx.w0.keys() else None

    def adapt(self) -> list[Phase]:
        if self.hp.finetune_epochs == 0:
            return []
        trains = self.private if self.hp.finetune == "head" else T.everything
        return [Phase(self.loss, trains, self.hp.finetune_epochs, lr=self.hp.finetune_lr)]

    @property
    def in_use(self) -> Literal["personal", "adapted"]:
        return "adapted" if self.hp.finetune_epochs > 0 else "personal"
