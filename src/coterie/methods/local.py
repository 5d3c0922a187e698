"""Local-Only: the lower reference of personalised learning.

Every client trains a model of its own, starting at the common initial model, and no payload crosses the network. A
client trains in the rounds in which it is sampled, so that its compute equals that of the other methods.
"""

from collections.abc import Sequence

from coterie.core.context import ClientId, State
from coterie.core.method import Card, Download, Method, Upload


class Local(Method):
    card = Card(
        title="Local-Only", paper="no collaboration (reference)", family="-", personal="the whole model", certainty="B"
    )
    agree = "output"

    def private(self, name: str) -> bool:
        return True

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return Download()

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        return server
