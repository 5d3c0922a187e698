"""Screen output of a running federation: connected nodes, round, score, bytes per link, errors."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coterie.errors import CoterieError
from coterie.federation.localhost.trial import LocalFederation


def watch(local: LocalFederation, console: Console, quiet: bool, stopped: Callable[[], bool]) -> bool:
    """Show it until it ends; returns False if a stop was requested. A dead device is shown, not restarted."""
    cloud = local.children["cloud"]
    terminal = sys.stdout.isatty() and not quiet
    said: tuple[Any, ...] = ()
    with Live(console=console, refresh_per_second=4, transient=False) if terminal else _Nothing() as live:
        while True:
            code = cloud.wait(0.2)
            status = local.status()
            if terminal:
                live.update(view(local, status))
            elif not quiet and (status.get("state"), status.get("round")) != said:
                said = status.get("state"), status.get("round")
                console.print(line(status), soft_wrap=True, highlight=False, markup=False)
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


class _Nothing:
    def __enter__(self) -> Any:
        return None

    def __exit__(self, *about: object) -> None:
        pass


def line(status: dict[str, Any]) -> str:
    """One line per round, for logs."""
    if not status:
        return "starting"
    here = sum(c["connected"] for c in status["clients"].values())
    words = [f"{status['state']}: round {status['round']}/{status['rounds']}", f"{here}/{status['places']} connected"]
    if status["text"]:
        words.append(str(status["text"]))
    for link, ways in status["wire"].items():
        size = sum(part["payload"] + part["framing"] for part in ways.values())
        words.append(f"{link} {size / 1e6:.2f} MB")
    return ", ".join(words + ([status["errors"][-1]] if status["errors"] else []))


def view(local: LocalFederation, status: dict[str, Any]) -> Group:
    parts: list[Any] = [Text(line(status))]
    table = Table("process", "pid", "alive", "connected", "as")
    connected = {c["name"]: (c["connected"], f"client {n}") for n, c in status.get("clients", {}).items()}
    connected |= {e: (True, f"{len(names)} devices") for e, names in status.get("edges", {}).items()}
    for name, child in local.children.items():
        here, what = connected.get(name, (name == "cloud" and bool(status), ""))
        table.add_row(name, str(child.pid), "yes" if child.alive else "no", "yes" if here else "no", what)
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
