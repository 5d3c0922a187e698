"""FedCPMD as its published code does it: a relay.

The published code averages nothing: a participant starts from the model of the client that trained last in its cluster.
Nothing is private in phase 1. A round here has one participant (of each cluster in phase 2), so that one round of ten
participants in the published code is ten rounds here.

- Votes are per mini-batch, and ties go to the layer fc2.
- The mismatch of a layer is equation (6) with inputs minus labels, not the estimate (7).
- The distances are the text's; the published code has other formulas, such as means without deviations for Wasserstein.
- Clusters run side by side, not one after the other.
"""

from dataclasses import replace
from typing import ClassVar

from coterie.core.method import Settings
from coterie.methods.fedcpmd.settings import FedCPMDCodeSettings
from coterie.methods.fedcpmd.text import FedCPMD


class FedCPMDCode(FedCPMD):
    """Models are passed on from client to client, never averaged."""

    Settings: ClassVar[type[Settings]] = FedCPMDCodeSettings
    card = replace(FedCPMD.card, title="FedCPMD (code)")

    voter_count = 1

    def participants(self, members: int) -> int:
        return 1
