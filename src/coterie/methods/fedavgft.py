"""FedAvg with fine-tuning, and LP-FT.

Yu, Bagdasaryan, Shmatikov, arXiv 2002.04758, 2020; Cheng, Chadha, Duchi, arXiv 2108.07313, 2021. LP-FT: Kumar,
Raghunathan, Jones, Ma, Liang, ICLR 2022.

The federation trains one model by FedAvg. Before a client uses it, it trains a copy on its own data: all of it
(`fedavg-ft`), or first the head with the body frozen and then all of it (`lp-ft`), which keeps the features of a body
whose head does not fit yet. The copy is the view `adapted`; it never feeds back. Rate and batch are the run's.
LP-FT was written for a pre-trained network; here the federation's model takes its place.
"""

from typing import Literal

from pydantic import Field

from coterie.core.method import Card, Method, Phase, Settings


class FedAvgFTSettings(Settings):
    finetune_epochs: float = Field(5, ge=0, description="epochs of fine-tuning before a copy is used")


class FedAvgFT(Method):
    Settings = FedAvgFTSettings
    hp: FedAvgFTSettings
    card = Card(
        "FedAvg + fine-tuning",
        "McMahan et al., AISTATS 2017, arXiv 1602.05629; fine-tuned as by Yu et al., arXiv 2002.04758",
        2020,
        "F",
        personal="the whole model, by fine-tuning",
        certainty="B",
        compute="rounds as FedAvg; before use, the epochs of fine-tuning, once",
    )

    def adapt(self) -> list[Phase]:
        return [Phase(self.loss, epochs=self.hp.finetune_epochs)] if self.hp.finetune_epochs > 0 else []

    @property
    def in_use(self) -> Literal["personal", "adapted"]:
        return "adapted" if self.hp.finetune_epochs > 0 else "personal"


class LPFTSettings(Settings):
    head_epochs: float = Field(5, ge=0, description="epochs on the head, body frozen, before a copy is used")
    finetune_epochs: float = Field(5, ge=0, description="epochs on everything after that")


class LPFT(Method):
    Settings = LPFTSettings
    hp: LPFTSettings
    card = Card(
        "LP-FT",
        "Kumar et al., ICLR 2022, arXiv 2202.10054, on the model of FedAvg",
        2022,
        "F",
        personal="the whole model, by fine-tuning",
        certainty="P",
        compute="rounds as FedAvg; before use, the epochs of fine-tuning, once",
    )
    needs = ("head",)

    def adapt(self) -> list[Phase]:
        head = Phase(self.loss, lambda name: name in self.ctx.group("head"), self.hp.head_epochs)
        return [p for p in (head, Phase(self.loss, epochs=self.hp.finetune_epochs)) if p.epochs]

    @property
    def in_use(self) -> Literal["personal", "adapted"]:
        return "adapted" if self.hp.head_epochs + self.hp.finetune_epochs > 0 else "personal"
