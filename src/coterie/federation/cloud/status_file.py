"""Writing status.json: the state of a running federation, for people and programs."""

import json
import os
import platform
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.engine.loop import Progress
from coterie.engine.session import Session
from coterie.federation.cloud.liveness import NodeHistory
from coterie.federation.cloud.runtime import FederationRuntime
from coterie.storage.atomic import write_atomic

_HEARTBEAT = 3.0  # seconds between heartbeats


class StatusFile:
    """Writes status.json whenever something changes, and a heartbeat while nothing does."""

    def __init__(self, path: Path, session: Session):
        self.path, self.session = path, session
        self._state, self._reason = "waiting", ""
        self._runtime: FederationRuntime | None = None
        self._progress = Progress(0, session.settings.rounds, None, 0.0)
        self._content: dict[str, Any] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._beat, name="status", daemon=True).start()

    def watch(self, runtime: FederationRuntime) -> None:
        """Show the state of this runtime."""
        self._runtime = runtime

    def publish(self) -> None:
        """Write the present state of the runtime."""
        if self._runtime is not None:
            waiting, begun = self._runtime.waiting, self._runtime.membership.begun
            self._state = "paused" if waiting.paused else "running" if begun else "waiting"
            self._reason = waiting.paused
            self._write(self._runtime)

    def progress(self, progress: Progress) -> None:
        """Remember the progress of the run, with the last value of its metric, for the next time of writing."""
        value = self._progress.value if progress.value is None else progress.value
        self._progress = replace(progress, value=value)

    def end(self, state: str, reason: str = "") -> None:
        """Write the final state, and end the heartbeats."""
        self._ended.set()
        self._state, self._reason = state, reason
        if self._runtime is not None:
            self._runtime.liveness.work("")
            self._write(self._runtime)
            return
        with self._lock:  # the run failed before there was a runtime
            self._content = {**self._summary(), "places": 0, "clients": {}, "nodes": {}, "edges": {}, "wire": {}}
            self._write_content()

    def _write(self, runtime: FederationRuntime) -> None:
        membership, liveness = runtime.membership, runtime.liveness
        roster = membership.roster
        content = {
            **self._summary(), "places": roster.places, "min_clients": runtime.waiting.rules.min_clients,
            "clients": {
                str(c): {"name": entry.name, "via": entry.via, "connected": c in membership.connected}
                for c, entry in sorted(roster.entries.items())
            },
            "nodes": _nodes(runtime), "doing": liveness.doing, "waiting_for": liveness.waiting_for,
            "edges": membership.edges, "wire": runtime.wire.totals,
            "ledger": {
                link: {way: sum(parts.values()) for way, parts in ways.items()}
                for link, ways in self._progress.bytes.items()
            },
            "errors": liveness.errors, "quarantine": runtime.quarantine.out,
        }  # fmt: skip
        with self._lock:
            self._content = content
            self._write_content()

    def _summary(self) -> dict[str, Any]:
        last = self._progress
        return {
            "state": self._state, "reason": self._reason, "method": self.session.method.card.title,
            "round": last.round, "rounds": last.rounds, "metric": last.metric.name, "value": last.value,
            "text": last.text, "seconds": round(last.seconds, 3), "pid": os.getpid(), "host": platform.node(),
            "errors": [], "ledger": {}, "doing": "", "waiting_for": [], "time": time.time(),
        }  # fmt: skip

    def _write_content(self) -> None:
        text = json.dumps({**self._content, "heartbeat": time.time()}, indent=1)
        write_atomic(self.path, text.encode(), durable=False)

    def _beat(self) -> None:
        """Renew the heartbeat while the cloud computes or waits."""
        while not self._ended.wait(_HEARTBEAT):
            with self._lock, suppress(OSError):
                if self._content and time.time() - self._content["time"] > _HEARTBEAT:
                    self._write_content()


def _nodes(runtime: FederationRuntime) -> dict[str, dict[str, Any]]:
    """Return what is known of every node that is registered, was seen or was refused."""
    membership, liveness = runtime.membership, runtime.liveness
    roles, roster, excluded = membership.known_roles, membership.roster, membership.excluded
    clients = {**roster.numbers, **{entry.name: c for c, entry in roster.entries.items()}}
    out = {}
    for name in sorted({*roles, *liveness.nodes, *clients, *excluded}):
        history = liveness.nodes.get(name, NodeHistory())
        out[name] = {
            "role": "edge" if name in roles and roles[name].is_edge else "device",
            "client": clients.get(name), "connected": name in liveness.connected,
            "last_seen": round(history.last, 1) or None, "round": history.round, "uploads": history.uploads,
            "refusals": history.refusals, "refused": history.refused, "out": excluded.get(name, ""),
        }  # fmt: skip
    return out
