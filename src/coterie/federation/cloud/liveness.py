"""What the cloud has seen of its nodes, for a person who watches; no decision rests on it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEPT = 5  # refusals of a node that are told


@dataclass
class NodeHistory:
    last: float = 0.0  # wall clock; 0: never
    round: int | None = None  # of its last accepted upload
    uploads: int = 0
    refusals: int = 0
    refused: list[dict[str, Any]] = field(default_factory=list)  # the latest, with round, reason and time


@dataclass
class Liveness:
    connected: set[str] = field(default_factory=set)  # nodes, by the cloud's names
    nodes: dict[str, NodeHistory] = field(default_factory=dict)
    doing: str = ""
    waiting_for: list[str] = field(default_factory=list)

    def here(self, nodes: set[str], edges: Mapping[str, set[str]]) -> None:
        """Who is connected now, to the cloud and to its edges."""
        self.connected = nodes | {name for devices in edges.values() for name in devices}
        now = time.time()
        for name in self.connected:
            self._of(name).last = now

    def uploaded(self, name: str, round: int) -> None:
        seen = self._of(name)
        seen.round, seen.uploads = round, seen.uploads + 1

    def refused(self, name: str, round: int, reason: str) -> None:
        seen = self._of(name)
        seen.refusals += 1
        entry = {"round": round, "reason": reason.removeprefix(f"{name}: "), "time": time.time()}
        seen.refused = [*seen.refused, entry][-KEPT:]

    def _of(self, name: str) -> NodeHistory:
        return self.nodes.setdefault(name, NodeHistory())
