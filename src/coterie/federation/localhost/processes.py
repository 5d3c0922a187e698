"""Child processes of a federation on one machine: each in a process group of its own, and stopped at exit."""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coterie.errors import CoterieError

_PARENT = "COTERIE_PARENT"


@dataclass
class Child:
    """A process with its log file; `start` can be called again after it has ended."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str]
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def start(self) -> "Child":
        """Start the process."""
        self.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
            # the process group lets its own children be stopped with it
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(self.env), start_new_session=True
            )
        _running.append(self)
        return self

    @property
    def pid(self) -> int:
        """The process id; raises CoterieError before `start`."""
        if self.process is None:
            raise CoterieError(f"{self.name} is not running")
        return self.process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, which ends the process as suddenly as a power cut."""
        self.signal(signal.SIGKILL)
        self._reap()

    def stop(self, grace: float = 5.0) -> None:
        """Send SIGTERM, wait, then send SIGKILL."""
        if self.alive and self.process is not None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        self.kill()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the process still runs after this time."""
        if self.process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _reap(self) -> None:
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self in _running:
            _running.remove(self)


_running: list[Child] = []


@atexit.register
def stop_all() -> None:
    """Stop all processes that this one has started, the last first."""
    for child in reversed(list(_running)):
        child.signal(signal.SIGTERM)
    for child in reversed(list(_running)):
        child.stop(grace=3.0)


def bound(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which programs of Coterie end when this process ends, even if it is killed."""
    return {**env, _PARENT: str(os.getpid())}


def die_with_parent(every: float = 0.5) -> None:
    """End this process and its group when its parent, the process in COTERIE_PARENT, has ended."""
    parent = os.environ.pop(_PARENT, "")
    if not parent.isdigit():
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(every)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def owner_only(folder: Path) -> None:
    """Deny other users access to the folder, and to all files that this process and its children will make.

    Logs, events, models and checkpoints all tell something about clients.
    """
    os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # also protects the files of a run that began with other permissions
    except OSError as e:
        raise CoterieError(f"{folder} cannot be used: {e.strerror or e}") from e


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
