"""Reading status.json, which the cloud of a federation writes every few seconds. Needs no extra."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, printable

HEARTBEAT_TIMEOUT = 15.0  # seconds without a heartbeat after which the cloud counts as silent
LIVE_STATES = ("waiting", "running", "paused")  # states of a running cloud; the others are ended, stopped and failed


def read_status(folder: Path) -> dict[str, Any]:
    """Return status.json of a federation's folder, or of a folder of `coterie up` with run/ in it."""
    path = next((p for p in (folder, folder / "run") if (p / "status.json").is_file()), folder) / "status.json"
    try:
        status: dict[str, Any] = json.loads(path.read_text())
        return {**status, "state": str(status["state"]), "heartbeat": float(status.get("heartbeat", status["time"]))}
    except FileNotFoundError:
        raise CoterieError(f"{folder} has no status.json: it holds no federation, or its cloud never started") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise CoterieError(f"{path} cannot be read ({e})") from None


def silence(status: dict[str, Any]) -> float:
    """Return the seconds since the last heartbeat of a cloud that should run; 0 if it is not silent, or has ended."""
    since = time.time() - float(status.get("heartbeat", status.get("time", 0)))
    return since if str(status["state"]) in LIVE_STATES and since > HEARTBEAT_TIMEOUT else 0.0


def is_dead(status: dict[str, Any]) -> bool:
    """Return True if the cloud's process has died. A silent cloud on a different host counts as dead."""
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
    """Return the state in words; a cloud with an old heartbeat is called dead or silent."""
    since = silence(status)
    if not since:
        return str(status["state"])
    word = "dead" if is_dead(status) else "silent"
    return f"{word} (last heartbeat {_span(since)} ago)"


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return the status as lines for a person."""
    try:
        return [printable(line) for line in _lines(status)]
    except (KeyError, TypeError, AttributeError) as e:
        raise CoterieError(f"status.json is damaged ({type(e).__name__}: {e})") from None


def _lines(status: dict[str, Any]) -> list[str]:
    reason = str(status.get("reason") or "")
    words = [f"{state_of(status)}: {status.get('method', '')}, round {status['round']} of {status['rounds']}"]
    if status.get("text"):
        words.append(str(status["text"]))
    lines = [", ".join(words)]
    if reason:
        lines.append(reason)
    connected = sum(bool(c.get("connected")) for c in status.get("clients", {}).values())
    if status["state"] in LIVE_STATES and not silence(status):
        lines.append(f"{connected} of {status.get('places', 0)} clients connected")
    return [*lines, *(f"in quarantine: {name} ({why})" for name, why in status.get("quarantine", {}).items())]


def _span(seconds: float) -> str:
    for size, word in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} s"
