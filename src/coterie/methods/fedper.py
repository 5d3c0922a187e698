"""FedPer. Arivazhagan, Aggarwal, Singh, Choudhary, arXiv 1912.00818, 2019.

The last layers stay on the client, the others are averaged; all are trained together.
"""

from pydantic import Field

from coterie.method import Method, Settings
from coterie.parts.groups import last_layers


class FedPerSettings(Settings):
    layers: int = Field(1, ge=0, description="how many of the last layers are personal (a norm goes with its layer)")


class FedPer(Method):
    Settings = FedPerSettings
    hp: FedPerSettings
    title = "FedPer"
    paper = "Arivazhagan et al., arXiv 1912.00818, 2019"
    year = 2019
    family = "S"
    personal_part = "the head"
    certainty = "B"

    def private(self, name: str) -> bool:
        return name in last_layers(self.ctx.net.layout, self.hp.layers)
