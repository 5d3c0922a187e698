"""FedPer. Arivazhagan, Aggarwal, Singh, Choudhary, arXiv 1912.00818, 2019.

The last layers stay on the client, the others are averaged; all are trained together. `part` names other groups that
stay on the client, such as low-rank adapters or one half of them (FedSA-LoRA: Guo et al., ICLR 2025, arXiv 2410.01463).
"""

from functools import cached_property

from pydantic import Field

from coterie.core.layers import Names
from coterie.core.method import Card, Method, Settings
from coterie.parts.layer_groups import last_layers, union_of_groups


class FedPerSettings(Settings):
    layers: int = Field(1, ge=0, description="how many of the last layers are personal (a norm goes with its layer)")
    part: str | None = Field(
        None,
        description="personal groups of entries instead, separated by commas: lora (private adapters), lora:B,head "
        "(FedSA-LoRA), norm, layer:NAME; empty: the last layers",
    )


class FedPer(Method):
    Settings = FedPerSettings
    hp: FedPerSettings
    card = Card("FedPer", "Arivazhagan et al., arXiv 1912.00818, 2019", 2019, "S", personal="the head", certainty="B")

    @cached_property
    def _own(self) -> Names:
        if self.hp.part is None:
            return last_layers(self.ctx.net.layout, self.hp.layers)
        return union_of_groups(self.ctx.net.layout, "part", self.hp.part)

    def check(self) -> None:
        _ = self._own

    def private(self, name: str) -> bool:
        return name in self._own
