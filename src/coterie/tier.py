"""Where the hooks of edges are computed: in a simulation beside the cloud's, in a federation on hosts of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from coterie import tree as T
from coterie.method import ANNOUNCE, Edge, EdgeId, Method, State, Upload


class Tier(Protocol):
    def attach(self, edges: Mapping[EdgeId, Edge]) -> None:
        """The edges of the round that begins."""

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]: ...


@dataclass(frozen=True)
class AtCloud:
    method: Method

    def attach(self, edges: Mapping[EdgeId, Edge]) -> None:
        pass

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        return self.method.merge(edge, uploads, round)


def called(method: Method, edge: Edge, uploads: Sequence[Upload], round: int) -> list[Upload]:
    """What crosses the link when devices announce themselves first: of those not called, the announcement only."""
    first = [replace(u, tree=T.keep(u.tree, lambda k: k.startswith(ANNOUNCE))) for u in uploads]
    wanted = method.calls(edge, first, round)
    if wanted is None:
        return list(uploads)
    return [u if u.sender in wanted else f for u, f in zip(uploads, first, strict=True)]
