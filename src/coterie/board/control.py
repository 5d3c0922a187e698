"""Start, stop and resume local runs. Every request is checked before a process is started."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.board.federation import tail
from coterie.board.runs import WatchedRun
from coterie.config import RunSettings, settings
from coterie.data.settings import PartitionSettings
from coterie.errors import CoterieError, unknown
from coterie.storage import run_folder as folder
from coterie.storage.run_folder import fresh_folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_OPTIONS = ("data", "model", "partition", "clients", "join", "rounds", "epochs", "batch", "lr", "seed")
_LONGEST = 200  # characters of the longest value


@dataclass
class Control:
    """Starts, stops and resumes runs. Runs continue when the board ends; their logs are in the folder of the runs."""

    root: Path
    data_dir: Path | None = None
    started: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)  # processes by id of the run
    _logs: Path | None = None

    @property
    def logs(self) -> Path:
        """The folder of the logs: RUNS/.board, or a temporary folder if RUNS is a run, which is only read."""
        if self._logs is None:
            inside = any((self.root / name).exists() for name in (folder.SETTINGS, folder.EVENTS))
            self._logs = Path(tempfile.mkdtemp(prefix="coterie-board-")) if inside else self.root / ".board"
        return self._logs

    def start(self, request: dict[str, Any]) -> str:
        """Start a new run with `coterie run`; return its id."""
        given = {str(k): v for k, v in request.items() if k != "name" and v not in (None, "")}
        for key, value in given.items():
            _check_setting(key, value)
        method = given.pop("method", "")
        chosen = settings(method=str(method), **given)  # raises before a process is started
        name = str(request.get("name") or "")
        if name and not _NAME.fullmatch(name):
            raise CoterieError(f'the name "{name}" must be letters, digits, dot, dash or underscore')
        out = self.root / name if name else fresh_folder(f"{chosen.method}-{chosen.data}", self.root)
        if out.exists():
            raise CoterieError(f'there is a folder "{out.name}" already; choose a different name')
        options = [f"--{k}={_text(given.pop(k))}" for k in _OPTIONS if k in given]
        sets = [f"--set={k}={_text(v)}" for k, v in given.items()]
        where = [f"--data-dir={self.data_dir}"] if self.data_dir else []
        self._launch(out.name, ["run", chosen.method, f"--out={out}", *where, *options, *sets])
        return out.name

    def resume(self, run: WatchedRun) -> None:
        if run.pid is not None:
            raise CoterieError(f'"{run.id}" is running')
        if run.state == "finished":
            raise CoterieError(f'"{run.id}" has finished')
        _local(run)
        where = [f"--data-dir={self.data_dir}"] if self.data_dir else []
        self._launch(run.id, ["run", f"--resume={run.path}", *where])

    def stop(self, run: WatchedRun) -> None:
        """Stop a run as Ctrl-C does: it finishes its round and writes a checkpoint."""
        _local(run)
        pid = folder.writer(run.path)  # the process that writes to this folder now
        if pid is None or pid <= 1 or pid == os.getpid():
            raise CoterieError(f'"{run.id}" is not running')
        try:
            os.kill(pid, signal.SIGINT)
        except ProcessLookupError:
            raise CoterieError(f'"{run.id}" is not running') from None
        except PermissionError:
            raise CoterieError(f'"{run.id}" belongs to a different user') from None

    def log(self, run: str) -> str:
        """Return the output of a run that was started here."""
        path = self._log(run)
        return tail(path) if path.exists() else ""

    def ended(self) -> dict[str, int]:
        """Return id -> exit code of the runs started here that ended with an error."""
        codes = {name: p.poll() for name, p in self.started.items()}
        return {name: code for name, code in codes.items() if code not in (None, 0, 130)}

    def _log(self, run: str) -> Path:
        return self.logs / (re.sub(r"[^A-Za-z0-9._-]", "_", run)[:150] + ".log")

    def _launch(self, run: str, arguments: list[str]) -> None:
        if (before := self.started.get(run)) is not None and before.poll() is None:
            raise CoterieError(f'"{run}" is running')
        path = self._log(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as out:  # a separate process group, so that Ctrl-C ends the board only
            self.started[run] = subprocess.Popen(
                [sys.executable, "-m", "coterie", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )


def _local(run: WatchedRun) -> None:
    if (run.path / "cloud.json").exists():
        raise CoterieError(f'"{run.id}" is a federation; stop and resume it where its cloud runs')


def _check_setting(key: str, value: Any) -> None:
    """Raise CoterieError if a name or value is not fit for a command line, or names code."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", key):
        raise unknown("setting", key[:40], [*RunSettings.model_fields, *PartitionSettings.model_fields])
    if isinstance(value, dict | list) or len(str(value)) > _LONGEST or any(ord(c) < 32 for c in str(value)):
        raise CoterieError(f"{key} must be one short value")
    if key in ("data", "model", "optimizer", "loss", "metrics") and ":" in str(value):
        raise CoterieError(f'{key} "{value}" names code or a download; start such a run from the command line')


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
