"""What the board knows of run folders. They are only read, as often as their files change, and may be half-written."""

import logging
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core.tasks import Classification, Metric, make
from coterie.errors import CoterieError
from coterie.results.run import Run
from coterie.storage import run_folder as folder

DEPTH = 6  # folders below the board's root that are searched
POINTS = 300  # of a curve
RECENT = 20  # rounds whose time tells how long the rest takes
CURVES = {
    "personal": "personal model, mean over clients",
    "participants": "participants before training, mean",
    "loss": "training loss",
    "megabytes": "sent so far (MB)",
}
log = logging.getLogger("coterie.board")


def discover(root: Path) -> Iterator[Path]:
    """Folders of runs, without looking into them; hidden folders are left out."""
    waiting = [(root, 0)]
    while waiting:
        here, depth = waiting.pop()
        try:
            entries = list(os.scandir(here))
        except OSError:
            continue
        if {folder.SETTINGS, folder.EVENTS} & {e.name for e in entries}:
            yield here
        elif depth < DEPTH:
            below = [e for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
            waiting += [(here / e.name, depth + 1) for e in below]


@dataclass
class WatchedRun:
    """One run's folder. `refresh` reads what is new; whatever is wrong with the files becomes a sentence."""

    path: Path
    id: str
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    trouble: str = ""
    pid: int | None = None  # of the process that writes to it now
    changed: float = 0.0  # when a file of it last did
    version: int = 0  # goes up with every change that a person could see
    _log: folder.Log = field(default_factory=lambda: folder.Log([]))
    _at: int = 0
    _marks: tuple[Any, ...] = ()
    _snapshot: dict[str, Any] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Did anything change?"""
        files = [self.path / name for name in (folder.SETTINGS, folder.EVENTS, folder.TIMING)]
        stamps, pid = [_mark(f) for f in files], folder.writer(self.path)
        marks = (*stamps, pid)
        if marks == self._marks:
            return False
        before, self._marks, self.pid = self._marks or (None, None, None, None), marks, pid
        self.changed = max((m[0] / 1e9 for m in stamps if m), default=self.changed)
        try:
            if not self.settings or marks[0] != before[0]:
                self.settings = folder.read_settings(self.path)
            if marks[1] != before[1]:
                self._log, self._at = folder.more_log(self.path / folder.EVENTS, self._log, self._at)
                self.rows = self._log.rows
            self.trouble = _plain(self._log.damage)
            self.seconds = {
                int(r["round"]): float(r["seconds"]) for r in folder.read_timing(self.path / folder.TIMING).rows
            }
        except CoterieError as e:
            self.trouble = _plain(str(e))
        except (OSError, ValueError, KeyError, TypeError) as e:
            self.trouble = _plain(f"{self.path} cannot be read ({e})")
        self.version += 1
        self._snapshot = {}
        return True

    # ---- what is shown -----------------------------------------------------------------------------------------------
    @property
    def run(self) -> dict[str, Any]:
        found = self.settings.get("settings")
        return found if isinstance(found, dict) else {}

    @property
    def metric(self) -> Metric:
        """What the run's numbers are; runs from before there were tasks have accuracies."""
        found = self.settings.get("task") or {"name": Classification.name, "outputs": 1}
        return make(str(found["name"]), int(found["outputs"])).metric

    @property
    def round(self) -> int:
        return int(self.rows[-1]["round"]) if self.rows else 0

    @property
    def state(self) -> str:
        if self.pid is not None:
            return "running"
        if self.trouble:
            return "damaged"
        done = self.rows and (self.round >= int(self.run.get("rounds", 1)) or self.rows[-1].get("ended"))
        return "finished" if done else "stopped"

    def snapshot(self) -> dict[str, Any]:
        """One line of the table, and the run's curves."""
        if not self._snapshot:
            try:
                self._snapshot = self._made()
            except (
                KeyError,
                TypeError,
                ValueError,
                AttributeError,
                CoterieError,
            ) as e:  # sealed, but not what this version writes
                self.trouble = _plain(f"{self.path} was written by another version of Coterie ({e})")
                self._snapshot = {"id": self.id, "state": "damaged", "trouble": self.trouble, "title": self.id,
                                  "curves": {}, "round": 0, "rounds": 0, "version": self.version}  # fmt: skip
        return {**self._snapshot, "state": self.state, "pid": self.pid}

    def _made(self) -> dict[str, Any]:
        federation, metric = self.run.get("federation") or {}, self.metric
        times = [self.seconds[r] for r in sorted(self.seconds)[-RECENT:]]
        rounds = int(self.run.get("rounds", 0))
        each = statistics.median(times) if times else None
        last = next((e for e in reversed(self.rows) if "personal/test" in e["eval"]), None)
        return {
            "id": self.id,
            "version": self.version,
            "title": str((self.settings.get("method") or {}).get("title", "")) or self.id,
            "method": str(self.run.get("method", "")),
            "data": str(self.run.get("data", "")),
            "partition": str(federation.get("partition", "")),
            "clients": federation.get("clients"),
            "seed": self.run.get("seed"),
            "round": self.round,
            "rounds": rounds,
            "score": None if last is None else metric.scale * float(last["eval"]["personal/test"]["mean"]),
            "metric": {"name": metric.name, "label": metric.label, "percent": metric.percent},
            "evaluated": None if last is None else last["round"],
            "bytes": sum(_bytes(e) for e in self.rows),
            "participants": len(self.rows[-1]["participants"]) if self.rows else 0,
            "failed": sum(len(e["failed"]) for e in self.rows),
            "nonfinite": sum(len(e["nonfinite"]) for e in self.rows),
            "seconds": each,
            "left": None if each is None else each * max(0, rounds - self.round),
            "changed": self.changed,
            "trouble": self.trouble,
            "federation": (self.path / "cloud.json").exists(),
            "curves": self.curves(),
        }

    def curves(self) -> dict[str, dict[str, list[float]]]:
        """Name -> rounds, values and megabytes sent by then, thinned out where there are many."""
        found: dict[str, list[tuple[int, float, float]]] = {name: [] for name in CURVES}
        sent, scale = 0, self.metric.scale

        def add(name: str, at: int, value: float | None) -> None:
            if value is not None:
                found[name].append((at, round(float(value), 4), round(sent / 1e6, 4)))

        for e in self.rows:
            sent += _bytes(e)
            at = int(e["round"])
            add("megabytes", at, sent / 1e6)
            add("loss", at, e["loss"])
            if "personal/test" in e["eval"]:
                add("personal", at, scale * e["eval"]["personal/test"]["mean"])
            if "before" in e["watch"]:
                add("participants", at, scale * e["watch"]["before"]["mean"])
        kept = {name: _thin(points) for name, points in found.items() if points}
        return {
            n: {"x": [p[0] for p in ps], "y": [p[1] for p in ps], "mb": [p[2] for p in ps]} for n, ps in kept.items()
        }

    def details(self) -> dict[str, Any]:
        """Settings, what went wrong round by round, and the clients of the last evaluation."""
        about = self.snapshot()
        wrong = []
        for e in self.rows if about["state"] != "damaged" else ():
            found = {**dict.fromkeys(e["nonfinite"], "the upload was not finite"), **(e.get("reasons") or {})}
            wrong += [{"round": e["round"], "client": int(c), "why": str(why)} for c, why in found.items()]
        return {**about, "settings": self.settings, "wrong": wrong[-200:], **self._clients()}

    def _clients(self) -> dict[str, Any]:
        from coterie.results.comparison import Comparison
        from coterie.results.report import content

        try:
            mine = Run(self.path)
            return {"clients": next(iter(content.client_data(Comparison([mine])).values()), None), "name": mine.title}
        except (CoterieError, OSError, ValueError, KeyError, TypeError) as e:
            return {"clients": None, "name": "", "no_clients": str(e)}


@dataclass
class WatchedFolder:
    """All runs below a folder."""

    root: Path
    runs: dict[str, WatchedRun] = field(default_factory=dict)
    _searched: float = 0.0

    def refresh(self, every: float = 2.0) -> None:
        if time.monotonic() - self._searched > every:
            self._searched = time.monotonic()
            found = {_id(self.root, p): p for p in discover(self.root)}
            self.runs = {i: self.runs.get(i) or WatchedRun(p, i) for i, p in sorted(found.items())}
        for run in self.runs.values():
            run.refresh()


def _id(root: Path, path: Path) -> str:
    return _plain(path.relative_to(root).as_posix() if path != root else root.resolve().name)


def _plain(text: str) -> str:
    """Bytes of file names that are no UTF-8 replaced, so that JSON can hold it."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _bytes(event: dict[str, Any]) -> int:
    return sum(sum(parts.values()) for ways in event["bytes"].values() for parts in ways.values())


def _thin(values: list[Any]) -> list[Any]:
    """Evenly, with the first and the last."""
    if len(values) <= POINTS:
        return values
    return [values[round(k * (len(values) - 1) / (POINTS - 1))] for k in range(POINTS)]
