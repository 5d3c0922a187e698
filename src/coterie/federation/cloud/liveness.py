"""The operator's view of a running cloud: connected nodes, their history, and the latest problems."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_REFUSALS_SHOWN = 5  # latest refusals of a node
_ERRORS_SHOWN = 20  # latest problems of the run
log = logging.getLogger("coterie.cloud")


@dataclass
class NodeHistory:
    """The history of one node since the cloud's program started."""

    last: float = 0.0  # time at which the node was last connected, in seconds since 1970; 0: never
    round: int | None = None  # round of its last accepted upload
    uploads: int = 0
    refusals: int = 0
    refused: list[dict[str, Any]] = field(default_factory=list)  # latest refusals with round, reason and time


@dataclass
class Liveness:
    """The state of the nodes as status.json shows it. No decision depends on it."""

    changed: Callable[[], None] = lambda: None  # called when there is something new to show
    connected: set[str] = field(default_factory=set)  # names of nodes, and of devices behind connected edges
    edges: dict[str, set[str]] = field(default_factory=dict)  # names of the devices behind each edge
    nodes: dict[str, NodeHistory] = field(default_factory=dict)
    doing: str = ""  # present activity of the cloud
    waiting_for: list[str] = field(default_factory=list)  # names of the nodes it waits for
    errors: list[str] = field(default_factory=list)  # latest problems, oldest first

    def observe(self, nodes: Iterable[str], edges: Mapping[str, Collection[str]]) -> None:
        """Record the nodes that are connected to the cloud, and the devices that are connected to its edges."""
        self.edges = {edge: set(devices) for edge, devices in edges.items()}
        self.connected = set(nodes).union(*self.edges.values())
        now = time.time()
        for name in self.connected:
            self._history(name).last = now

    def observe_waiting(self, connected: Collection[str], asked: Collection[str]) -> None:
        """Record the connected nodes while the transport waits for the answers of the nodes in `asked`."""
        self.observe(connected, {edge: devices for edge, devices in self.edges.items() if edge in connected})
        self.waiting_for = sorted(asked)
        self.changed()

    def work(self, doing: str, waiting_for: Iterable[str] = ()) -> None:
        """Record the cloud's present activity; an empty text if it has none."""
        self.doing, self.waiting_for = doing, sorted(waiting_for)

    def uploaded(self, name: str, round: int) -> None:
        """Record an accepted upload of a node."""
        history = self._history(name)
        history.round, history.uploads = round, history.uploads + 1

    def refused(self, name: str, round: int, reason: str) -> None:
        """Record a refused answer of a node."""
        history = self._history(name)
        history.refusals += 1
        entry = {"round": round, "reason": reason.removeprefix(f"{name}: "), "time": time.time()}
        history.refused = [*history.refused, entry][-_REFUSALS_SHOWN:]

    def problem(self, text: str) -> None:
        """Log a problem, and show it among the latest ones."""
        log.warning("%s", text)
        self.errors = [*self.errors, text][-_ERRORS_SHOWN:]

    def _history(self, name: str) -> NodeHistory:
        return self.nodes.setdefault(name, NodeHistory())
