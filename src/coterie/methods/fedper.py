"""FedPer. Arivazhagan, Aggarwal, Singh, Choudhary, arXiv 1912.00818, 2019.

The last layers stay on the client, the others are averaged; all are trained together.
"""

from pydantic import Field

from coterie.core.method import Card, Method, Settings
from coterie.parts.layer_groups import last_layers


class FedPerSettings(Settings):
    layers: int = Field(1, ge=0, description="how many of the last layers are personal (a norm goes with its layer)")


class FedPer(Method):
    Settings = FedPerSettings
    hp: FedPerSettings
    card = Card("FedPer", "Arivazhagan et al., arXiv 1912.00818, 2019", 2019, "S", personal="the head", certainty="B")

    def private(self, name: str) -> bool:
        return name in last_layers(self.ctx.net.layout, self.hp.layers)
