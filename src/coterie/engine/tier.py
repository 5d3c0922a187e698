"""Where the hooks of edges are computed: in a simulation beside the cloud's, in a federation on hosts of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coterie.method import Edge, EdgeId, Method, State, Upload


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
