"""Reading status.json, which the cloud of a federation writes every few seconds. Needs no Flower."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, printable

SILENT = 15.0  # seconds without a heartbeat after which the cloud is taken for gone
LIVE = ("waiting", "running", "paused")  # states of a cloud that is there; the others: ended, stopped, failed


def read_status(folder: Path) -> dict[str, Any]:
    """status.json of a federation's folder, or of that of `coterie up` with run/ in it."""
    path = next((p for p in (folder, folder / "run") if (p / "status.json").is_file()), folder) / "status.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return {**found, "state": str(found["state"]), "heartbeat": float(found.get("heartbeat", found["time"]))}
    except FileNotFoundError:
        raise CoterieError(f"{folder} has no status.json: it holds no federation, or its cloud never started") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise CoterieError(f"{path} cannot be read ({e})") from None


def silence(status: dict[str, Any]) -> float:
    """Seconds since the last heartbeat of a cloud that should be there; 0 if it is heard, or has ended."""
    since = time.time() - float(status.get("heartbeat", status.get("time", 0)))
    return since if str(status["state"]) in LIVE and since > SILENT else 0.0


def dead(status: dict[str, Any]) -> bool:
    """Has the cloud gone without a word? Where it runs on another host, a missing heartbeat has to do."""
    if not silence(status):
        return False
    if status.get("host", platform.node()) != platform.node():
        return True
    pid = status.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        pass
    return False


def state_of(status: dict[str, Any]) -> str:
    """The state in words; a heartbeat that is old tells of a cloud that died or hangs."""
    since = silence(status)
    if not since:
        return str(status["state"])
    word = "dead" if dead(status) else "silent"
    return f"{word} (last heartbeat {_span(since)} ago)"


def lines(status: dict[str, Any]) -> list[str]:
    """What a person wants to know, one thing a line."""
    try:
        return [printable(line) for line in _lines(status)]
    except (KeyError, TypeError, AttributeError) as e:
        raise CoterieError(f"status.json is damaged ({type(e).__name__}: {e})") from None


def _lines(status: dict[str, Any]) -> list[str]:
    reason = str(status.get("reason") or "")
    words = [f"{state_of(status)}: {status.get('method', '')}, round {status['round']} of {status['rounds']}"]
    if status.get("text"):
        words.append(str(status["text"]))
    found = [", ".join(words)]
    if reason:
        found.append(reason)
    here = [c for c in status.get("clients", {}).values() if c.get("connected")]
    live = status["state"] in LIVE and not silence(status)
    if live:
        found.append(f"{len(here)} of {status.get('places', 0)} clients connected")
    return [*found, *(f"in quarantine: {name} ({why})" for name, why in status.get("quarantine", {}).items())]


def _span(seconds: float) -> str:
    for size, word in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} s"


__all__ = ["LIVE", "SILENT", "dead", "lines", "read_status", "silence", "state_of"]
