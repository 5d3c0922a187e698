"""The state of a federation for the board: the cloud's status.json and the logs of `coterie up`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.federation.cloud.status import LIVE_STATES, is_dead, silence

TAIL = 32_768  # bytes of a log to show


@dataclass
class FederationStatus:
    """The state of a federation in the folder of `coterie serve`, or of `coterie up` with run/ in it."""

    path: Path

    @property
    def folder(self) -> Path:
        return self.path if (self.path / "status.json").exists() else self.path / "run"

    def snapshot(self) -> dict[str, Any]:
        """Return cloud, edges and devices as a tree; `trouble` tells why if that cannot be read."""
        try:
            status = json.loads((self.folder / "status.json").read_text())
            return self._read(status)
        except FileNotFoundError:
            return {"trouble": f"{self.path} has no status.json yet; its cloud may not be running", "logs": self.logs()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            return {"trouble": f"{self.folder / 'status.json'} cannot be read ({e})", "logs": self.logs()}

    def _read(self, status: dict[str, Any]) -> dict[str, Any]:
        beat = float(status.get("heartbeat", status["time"]))
        state = str(status["state"])
        since = silence(status)
        silent = since > 0
        word = "dead" if is_dead(status) else "silent"
        nodes = [_node(name, about, state, silent) for name, about in sorted(_nodes(status).items())]
        edges = [n for n in nodes if n["role"] == "edge"]
        for edge in edges:
            edge["devices"] = [n for n in nodes if n["via"] == edge["name"] and n["role"] == "device"]
        behind = {n["name"] for e in edges for n in e["devices"]}
        return {
            "trouble": _trouble(status, word, since),
            "state": word if silent else state,
            "method": str(status.get("method", "")),
            "round": int(status["round"]),
            "rounds": int(status["rounds"]),
            "doing": str(status.get("doing", "")),
            "score": str(status.get("text") or ""),
            "seconds": float(status.get("seconds", 0)),
            "places": int(status.get("places", 0)),
            "online": sum(n["online"] for n in nodes if n["role"] == "device"),
            "waiting_for": [str(n) for n in status.get("waiting_for", [])] if not silent else [],
            "heartbeat": beat,
            "edges": edges,
            "devices": [n for n in nodes if n["role"] == "device" and n["name"] not in behind],
            "wire": {
                str(link): {str(way): {k: int(v) for k, v in part.items()} for way, part in ways.items()}
                for link, ways in status.get("wire", {}).items()
            },
            "errors": [str(e) for e in status.get("errors", [])],
            "logs": self.logs(),
        }

    def logs(self) -> list[str]:
        """Return the names of the logs."""
        return sorted(p.stem for p in (self.path / "logs").glob("*.log"))

    def log(self, name: str) -> str | None:
        """Return the end of a log, or None if the name is unknown."""
        return tail(self.path / "logs" / f"{name}.log") if name in self.logs() else None


def _trouble(status: dict[str, Any], word: str, since: float) -> str:
    if since:
        state = "its process has ended" if word == "dead" else "it may have ended"
        return f"no heartbeat of the cloud for {since:.0f} s: {state}"
    return str(status.get("reason") or "") if status["state"] in ("paused", "failed") else ""


def tail(path: Path) -> str:
    try:
        with path.open("rb") as f:
            f.seek(max(0, f.seek(0, 2) - TAIL))
            return f.read().decode(errors="replace")
    except OSError as e:
        return f"(the log cannot be read: {e.strerror})"


def _nodes(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if "nodes" in status:
        return dict(status["nodes"])
    nodes = {  # written by an older cloud
        c["name"]: {"role": "device", "client": int(i), "connected": c["connected"]}
        for i, c in status["clients"].items()
    }
    return nodes | {e: {"role": "edge", "connected": True} for e in status.get("edges", {})}


def _node(name: str, about: dict[str, Any], state: str, silent: bool) -> dict[str, Any]:
    refused = [r for r in about.get("refused", []) if isinstance(r, dict)]
    return {
        "name": str(name),
        "role": "edge" if about.get("role") == "edge" else "device",
        "via": str(name).partition("/")[0] if "/" in str(name) else "cloud",
        "client": about.get("client"),
        "online": bool(about.get("connected")) and state in LIVE_STATES and not silent,
        "last_seen": about.get("last_seen"),
        "round": about.get("round"),
        "uploads": about.get("uploads"),
        "out": str(about.get("out", "")),
        "refused": [
            {"round": r.get("round"), "why": str(r.get("reason", "")), "time": r.get("time")} for r in refused[-5:]
        ],
        "refusals": int(about.get("refusals", len(refused))),
    }
