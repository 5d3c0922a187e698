"""FedRep. Collins, Hassani, Mokhtari, Shakkottai, ICML 2021 (arXiv 2102.07078).

The head stays on the client. Local training first fits the head with the body frozen, then the body with the head
frozen. Departs from the authors' code in one place: batch norm inside the frozen body stands still in the head phase.
"""

from pydantic import Field

from coterie.method import Card, Method, Phase, Settings


class FedRepSettings(Settings):
    head_epochs: float = Field(4, ge=0, description="epochs on the head, body frozen")
    body_epochs: float = Field(1, ge=0, description="epochs on the body, head frozen")


class FedRep(Method):
    Settings = FedRepSettings
    hp: FedRepSettings
    card = Card("FedRep", "Collins et al., ICML 2021, arXiv 2102.07078", 2021, "S", personal="the head")
    needs = ("head",)

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def phases(self, round: int) -> list[Phase]:
        return [
            Phase(self.loss, self.private, self.hp.head_epochs),
            Phase(self.loss, lambda name: not self.private(name), self.hp.body_epochs),
        ]
