"""Run folders that the board watches. They are only read, whenever their files change, and may be incomplete."""

import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core.metrics import Metric
from coterie.core.tasks import Classification, make
from coterie.errors import CoterieError
from coterie.results.run import Run
from coterie.storage import run_folder as folder

_DEPTH = 6  # levels of folders below the board's root that are searched
_POINTS = 300  # points of a curve
_RECENT = 20  # rounds that the remaining time is estimated from
CURVES = {
    "personal": "model in use (personal or adapted), mean over clients",
    "participants": "participants before training, mean",
    "loss": "training loss",
    "megabytes": "sent so far (MB)",
}
log = logging.getLogger("coterie.board")


def discover(root: Path) -> Iterator[Path]:
    """Yield the folders of runs, except hidden ones; subfolders of a run are not searched."""
    waiting = [(root, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue
        if {folder.SETTINGS, folder.EVENTS} & {e.name for e in entries}:
            yield path
        elif depth < _DEPTH:
            below = [e for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
            waiting += [(path / e.name, depth + 1) for e in below]


@dataclass
class WatchedRun:
    """The folder of one run. `refresh` reads new data; problems with the files are described in `trouble`."""

    path: Path
    id: str
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    trouble: str = ""
    pid: int | None = None  # process that writes to the folder now
    changed: float = 0.0  # time of the last change of a file
    version: int = 0  # incremented with every visible change
    _log: folder.Log = field(default_factory=lambda: folder.Log([]))
    _at: int = 0
    _marks: tuple[Any, ...] = ()
    _snapshot: dict[str, Any] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Read the folder; return True if anything changed."""
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

    # ---- for the page ------------------------------------------------------------------------------------------------
    @property
    def run(self) -> dict[str, Any]:
        settings = self.settings.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def metric(self) -> Metric:
        """The metric of the run's task; old runs without one are classification."""
        task = self.settings.get("task") or {"name": Classification.name, "outputs": 1}
        return make(str(task["name"]), int(task["outputs"])).metric

    @property
    def headline(self) -> str:
        """The test scores of the run's headline, or of personal models if it was not scored."""
        name = f"{self.run.get('headline', 'personal')}/test"
        return name if any(name in e["eval"] for e in self.rows) else "personal/test"

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
        """Return the run's row of the table and its curves."""
        if not self._snapshot:
            try:
                self._snapshot = self._describe()
            except (KeyError, TypeError, ValueError, AttributeError, CoterieError) as e:
                self.trouble = _plain(f"{self.path} was written by a different version of Coterie ({e})")
                self._snapshot = {"id": self.id, "state": "damaged", "trouble": self.trouble, "title": self.id,
                                  "curves": {}, "round": 0, "rounds": 0, "version": self.version}  # fmt: skip
        return {**self._snapshot, "state": self.state, "pid": self.pid}

    def _describe(self) -> dict[str, Any]:
        federation, metric = self.run.get("federation") or {}, self.metric
        own = (self.settings.get("partition") or {}).get("partition") == "own"  # devices with data of their own
        times = [self.seconds[r] for r in sorted(self.seconds)[-_RECENT:]]
        rounds = int(self.run.get("rounds", 0))
        each = statistics.median(times) if times else None
        view = self.headline
        last = next((e for e in reversed(self.rows) if view in e["eval"]), None)
        return {
            "id": self.id,
            "version": self.version,
            "title": str((self.settings.get("method") or {}).get("title", "")) or self.id,
            "method": str(self.run.get("method", "")),
            "data": "own data" if own else str(self.run.get("data", "")),
            "partition": "by device" if own else str(federation.get("partition", "")),
            "clients": federation.get("clients"),
            "seed": self.run.get("seed"),
            "group": _group(self.run),
            "round": self.round,
            "rounds": rounds,
            "score": None if last is None else _scaled(metric.scale, last["eval"][view]["mean"]),
            "headline": view.partition("/")[0],
            "warnings": [str(w) for w in self.settings.get("warnings") or ()],
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
        """Return curve -> rounds, values and cumulative megabytes, with fewer points where there are many."""
        points: dict[str, list[tuple[int, float, float]]] = {name: [] for name in CURVES}
        sent, scale, view = 0, self.metric.scale, self.headline

        def add(name: str, at: int, value: float | None) -> None:
            if value is not None:
                points[name].append((at, round(float(value), 4), round(sent / 1e6, 4)))

        for e in self.rows:
            sent += _bytes(e)
            at = int(e["round"])
            add("megabytes", at, sent / 1e6)
            add("loss", at, e["loss"])
            if view in e["eval"]:
                add("personal", at, _scaled(scale, e["eval"][view]["mean"]))
            if "before" in e["watch"]:
                add("participants", at, _scaled(scale, e["watch"]["before"]["mean"]))
        thin = {name: _thin(ps) for name, ps in points.items() if ps}
        return {
            n: {"x": [p[0] for p in ps], "y": [p[1] for p in ps], "mb": [p[2] for p in ps]} for n, ps in thin.items()
        }

    def details(self) -> dict[str, Any]:
        """Return the settings, the failures by round, and the clients of the last evaluation."""
        about = self.snapshot()
        wrong = []
        for e in self.rows if about["state"] != "damaged" else ():
            reasons = {**dict.fromkeys(e["nonfinite"], "the upload was not finite"), **(e.get("reasons") or {})}
            wrong += [{"round": e["round"], "client": int(c), "why": str(why)} for c, why in reasons.items()]
        return {**about, "settings": self.settings, "wrong": wrong[-5000:], **self._clients()}

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
            paths = {_id(self.root, p): p for p in discover(self.root)}
            self.runs = {i: self.runs.get(i) or WatchedRun(p, i) for i, p in sorted(paths.items())}
        for run in self.runs.values():
            run.refresh()


def _id(root: Path, path: Path) -> str:
    return _plain(path.relative_to(root).as_posix() if path != root else root.resolve().name)


def _group(settings: dict[str, Any]) -> str:
    """Return a name that runs share which differ in their seed only."""
    rest = json.dumps({k: v for k, v in settings.items() if k != "seed"}, sort_keys=True, default=str)
    return hashlib.blake2b(rest.encode(), digest_size=8).hexdigest()


def _scaled(scale: float, value: float | None) -> float | None:
    """Return a value as the page shows it; None if the metric is not defined, as AUC for clients of one class."""
    return None if value is None else scale * float(value)


def _plain(text: str) -> str:
    """Replace bytes of file names that are not UTF-8, for JSON."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _bytes(event: dict[str, Any]) -> int:
    return sum(sum(parts.values()) for ways in event["bytes"].values() for parts in ways.values())


def _thin(values: list[Any]) -> list[Any]:
    """Return evenly spaced values, with the first and the last."""
    if len(values) <= _POINTS:
        return values
    return [values[round(k * (len(values) - 1) / (_POINTS - 1))] for k in range(_POINTS)]
