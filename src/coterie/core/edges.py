"""Methods with edge servers: aggregators between devices and cloud."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coterie.core import tree as T
from coterie.core.method import ClientId, Download, EdgeId, Method, State, Upload
from coterie.core.tree import Tree

ANNOUNCE = "announce:"  # marks the entries a device sends ahead of the rest of its upload (see EdgeMethod.calls)


@dataclass(frozen=True)
class Edge:
    """An edge server as its hooks see it."""

    id: EdgeId
    clients: tuple[ClientId, ...]  # attached, whether sampled or not
    state: State  # what it kept from earlier rounds; empty at first
    download: Download  # what it received this round

    @property
    def received(self) -> list[Tree]:
        """The trees it received: one for all its clients, and those for single ones."""
        sent = self.download
        return [{**sent.shared, **sent.edge.get(self.id, {})}, *sent.each.values()]


class EdgeMethod(Method):
    """A method whose clients talk to an edge server, which hands on what the cloud sends and merges what they send.

    A client that no edge serves (a newcomer, or one not assigned yet) talks to the cloud itself.
    """

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        """The clients of each edge; None while everybody talks to the cloud."""
        return None

    def cluster_of(self, server: State) -> Mapping[ClientId, int] | None:
        layout = self.edges(server)
        return None if layout is None else {i: e for e, members in layout.items() for i in members}

    def relay(self, edge: Edge, ids: Sequence[ClientId], round: int) -> Download:
        """What an edge hands on to its sampled clients; default: as received."""
        got = edge.download
        return Download({**got.shared, **got.edge.get(edge.id, {})}, {i: got.each[i] for i in ids if i in got.each})

    def calls(self, edge: Edge, announced: Sequence[Upload], round: int) -> Collection[ClientId] | None:
        """Who is to send the rest, judged by the entries marked ANNOUNCE alone; None: everybody sends all at once."""
        return None

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        """What an edge makes of its clients' uploads; default: their mean, weighted as the run says."""
        return edge.state, Upload(T.mean([u.tree for u in uploads], self.weights(uploads)))


__all__ = ["ANNOUNCE", "Edge", "EdgeMethod"]
