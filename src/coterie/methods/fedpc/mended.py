"""FedPC mended: a contrast of prototypes that cannot collapse. Coterie's own, 2026.

After FedPC (Liu, Wang, Liu, Ma, Journal on Communications 2025), whose groups and mixing it keeps. The pull towards the
prototypes becomes the cross-entropy of the cosines between a feature and all prototypes, for which features at one
point have the largest loss. The private classifier also learns from the received prototypes, as samples of their
classes, and so keeps classes that the client lacks.

- The printed pull (3) has its minimum where all features are equal.
- There are no prototypes in the first round, because those of the initial model say little.
- A client uses the best model it has trained, by its validation data, unless the received model is better.
"""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Settings, Start
from coterie.core.tree import Tree
from coterie.methods.fedpc import prototypes as P
from coterie.methods.fedpc.contrast import directions, rehearsal, rehearsal_loss, towards
from coterie.methods.fedpc.settings import FedPCMendedSettings
from coterie.methods.fedpc.text import FedPC


class FedPCMended(FedPC):
    """FedPC with a contrast and a rehearsal instead of the pull."""

    Settings: ClassVar[type[Settings]] = FedPCMendedSettings
    hp: FedPCMendedSettings  # type: ignore[assignment]  # the hooks that read the text's loss settings are replaced
    card = replace(FedPC.card, title="FedPC (mended)", certainty="O")
    use = "best"
    controls = ("fedpc-mended-no-proto", "fedpc-mended-random")

    def departures(self) -> list[str]:
        return []

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        received = start.extras["received"]
        return start.adding(directions=directions(received, self.hp.tau), rehearsal=rehearsal(received))

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return alpha * cross-entropy + gamma * contrast + rehearsal."""
        hp = self.hp
        logits, z = P.logits_and_features(self.ctx, params, batch.x, hp.feature)
        loss = hp.alpha * self.ctx.loss_of(logits, batch)
        if hp.gamma:
            loss = loss + hp.gamma * towards(z, batch.y, extras["directions"], batch.weight)
        if hp.rehearsal:
            weight, bias = self.ctx.net.head_names
            b = None if bias is None else params[bias]
            loss = loss + hp.rehearsal * rehearsal_loss(params[weight], b, extras["rehearsal"])
        return loss
