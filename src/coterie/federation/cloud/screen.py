"""Screen output of a running federation: connected nodes, round, score, bytes per link, problems."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coterie.errors import CoterieError
from coterie.federation.localhost.trial import LocalFederation


def watch_federation(local: LocalFederation, console: Console, quiet: bool, stopped: Callable[[], bool]) -> bool:
    """Show a federation until its cloud has ended. Return False if a stop was requested.

    Raises CoterieError if the cloud fails. Devices that end are shown as not alive, and are not restarted.
    """
    cloud = local.children["cloud"]
    terminal = sys.stdout.isatty() and not quiet
    last: tuple[Any, ...] = ()  # state and round of the last printed line
    with Live(console=console, refresh_per_second=4, transient=False) if terminal else nullcontext() as live:
        while True:
            code = cloud.wait(0.2)
            status = local.status()
            if live is not None:
                live.update(_view(local, status))
            elif not quiet and (status.get("state"), status.get("round")) != last:
                last = status.get("state"), status.get("round")
                console.print(_line(status), soft_wrap=True, highlight=False, markup=False)
            if code == 0:
                return True
            if code is not None:
                raise CoterieError(f"the cloud ended with {code}; see {cloud.log}:\n{cloud.tail()}")
            if stopped():
                cloud.signal(2)
                until = time.monotonic() + 30
                while cloud.wait(0.2) is None and time.monotonic() < until:
                    pass
                return False


def _line(status: dict[str, Any]) -> str:
    """Return the status in one line."""
    if not status:
        return "starting"
    connected = sum(c["connected"] for c in status["clients"].values())
    words = [f"{status['state']}: round {status['round']}/{status['rounds']}"]
    words.append(f"{connected}/{status['places']} connected")
    if status["text"]:
        words.append(str(status["text"]))
    for link, ways in status["wire"].items():
        size = sum(part["payload"] + part["framing"] for part in ways.values())
        words.append(f"{link} {size / 1e6:.2f} MB")
    return ", ".join(words + ([status["errors"][-1]] if status["errors"] else []))


def _view(local: LocalFederation, status: dict[str, Any]) -> Group:
    """Return tables of processes and links, and the latest problems."""
    parts: list[Any] = [Text(_line(status))]
    table = Table("process", "pid", "alive", "connected", "as")
    nodes = {c["name"]: (c["connected"], f"client {n}") for n, c in status.get("clients", {}).items()}
    nodes |= {e: (True, f"{len(names)} devices") for e, names in status.get("edges", {}).items()}
    for name, child in local.children.items():
        connected, role = nodes.get(name, (name == "cloud" and bool(status), ""))
        table.add_row(name, str(child.pid), "yes" if child.alive else "no", "yes" if connected else "no", role)
    parts.append(table)
    if wire := status.get("wire"):
        links = Table("link", "direction", "payload", "framing", "ledger")
        for link, ways in wire.items():
            for way, part in ways.items():
                ledger = status["ledger"].get(link, {}).get(way, 0)
                links.add_row(link, way, *(f"{n:,}" for n in (part["payload"], part["framing"], ledger)))
        parts.append(links)
    parts += [Text(e, style="red") for e in status.get("errors", [])[-5:]]
    return Group(*parts)
