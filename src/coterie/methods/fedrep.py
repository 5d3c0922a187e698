"""FedRep. Collins, Hassani, Mokhtari, Shakkottai, ICML 2021 (arXiv 2102.07078).

The head stays on the client. Local training first fits the head with the body frozen, then the body with the head
frozen. Departs from the authors' code:
- Batch norm inside the frozen body is not updated in the head phase.
- It ends with a round in which all clients fit their heads for 10 epochs or more. Here clients are scored as they are,
  as in every other method; `final_epochs` adds that round as the view `adapted`.
- A client that was never sampled holds the initial head. The authors' code gives it the mean of the other heads, which
  would have to leave their clients.
- The authors' PyTorch let the head drift by momentum in the body phase, because its gradients were zero, not None. It
  is frozen here.
- The mean is by samples as in their general code; for CIFAR and MNIST they average uniformly (`weighting = uniform`).
"""

from typing import Literal

from pydantic import Field

from coterie.core.method import Card, Method, Phase, Settings


class FedRepSettings(Settings):
    head_epochs: float = Field(4, ge=0, description="epochs on the head, body frozen")
    body_epochs: float = Field(1, ge=0, description="epochs on the body, head frozen")
    final_epochs: float = Field(0, ge=0, description="epochs on the head before a copy is scored as adapted")


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

    def adapt(self) -> list[Phase]:
        return [Phase(self.loss, self.private, self.hp.final_epochs)] if self.hp.final_epochs else []

    @property
    def in_use(self) -> Literal["personal", "adapted"]:
        return "adapted" if self.hp.final_epochs > 0 else "personal"
