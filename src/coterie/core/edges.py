"""Methods with edge servers: aggregators between devices and cloud."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coterie.core import tree as T
from coterie.core.context import ClientId, EdgeId, EdgeState, State
from coterie.core.method import Download, Method, Upload
from coterie.core.tree import Tree

ANNOUNCE = "announce:"  # prefix of the entries that a device sends before the rest of its upload (see EdgeMethod.calls)


def is_announced(name: str) -> bool:
    """True for an entry that a device sends before the rest of its upload."""
    return name.startswith(ANNOUNCE)


@dataclass(frozen=True)
class Edge:
    """An edge server as its hooks see it."""

    id: EdgeId
    clients: tuple[ClientId, ...]  # attached clients, sampled or not
    state: EdgeState  # the edge's state from earlier rounds; empty at first
    download: Download  # the download of this round

    @property
    def received(self) -> list[Tree]:
        """The received trees: one for all its clients, and one for each client with a tree of its own."""
        sent = self.download
        return [{**sent.shared, **sent.edge.get(self.id, {})}, *sent.each.values()]


class EdgeMethod(Method):
    """A method whose clients talk to an edge server, which relays downloads and merges uploads.

    A client without an edge (a newcomer, or a client that is not assigned yet) talks to the cloud.
    """

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        """Return the clients of each edge; None while all clients talk to the cloud."""
        return None

    def cluster_of(self, server: State) -> Mapping[ClientId, int] | None:
        layout = self.edges(server)
        return None if layout is None else {i: e for e, members in layout.items() for i in members}

    def relay(self, edge: Edge, ids: Sequence[ClientId], round: int) -> Download:
        """Return the download for an edge's sampled clients; by default as the edge received it."""
        got = edge.download
        return Download({**got.shared, **got.edge.get(edge.id, {})}, {i: got.each[i] for i in ids if i in got.each})

    def calls(self, edge: Edge, announced: Sequence[Upload], round: int) -> Collection[ClientId] | None:
        """Choose from the announcements which clients send the rest of their uploads; None: all of them.

        A method whose schema of uploads has entries marked ANNOUNCE uploads in two steps: each client sends these
        entries, and only the clients that are called send the rest. If one of them fails, this hook is asked again
        without it, so it must depend on its arguments alone.
        """
        return None

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        """Return the edge's new state and its upload; by default the mean of its clients' uploads."""
        return edge.state, Upload(T.mean([u.tree for u in uploads], self.weights(uploads)))
