"""The processes of a federation on one machine: started in groups of their own, watched, and always stopped.

Facts about Flower 1.41: `flower-superlink` listens on one port (default 8000) for all; with `--isolation process`
it starts no further processes; its state is in memory unless `--database FILE` is given (SQLite: registered nodes,
messages and payload chunks then survive its death, and payloads lie on disk instead of in its memory). Unless told not
to, Flower writes to ~/.flwr, asks for updates, sends telemetry and installs packages an app names.
"""

import atexit
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coterie.errors import CoterieError
from coterie.runtimes.flower.certs import Certs

PARENT = "COTERIE_PARENT"


def flower_env(home: Path) -> dict[str, str]:
    """The environment for Flower: a private home; no telemetry, no update check, no installing of packages."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    scripts = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": scripts + os.pathsep + os.environ.get("PATH", ""),  # Flower calls its own commands by name
        "PYTHONUNBUFFERED": "1",
    }


def use_flower(home: Path) -> None:
    """Make this process's environment the one for Flower, before Flower is imported."""
    try:
        os.environ.update(flower_env(home))
    except OSError as e:
        raise CoterieError(f"{home} cannot be used: {e.strerror}") from e
    need_flower()


@dataclass
class Child:
    """A process we started, with the log it writes; `restart` starts the same again."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str]
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def start(self) -> "Child":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            # a group of its own, so that what the process itself starts can be stopped with it
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(self.env), start_new_session=True
            )
        _running.append(self)
        return self

    @property
    def pid(self) -> int:
        if self.process is None:
            raise CoterieError(f"{self.name} is not running")
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """To the whole group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """At once, as a power cut would."""
        self.signal(signal.SIGKILL)
        self._reap()

    def stop(self, grace: float = 5.0) -> None:
        """Ask, wait, insist."""
        if self.alive and self.process is not None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        self.kill()

    def restart(self) -> "Child":
        self.stop()
        return self.start()

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None if it still runs."""
        if self.process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def tail(self, lines: int = 15) -> str:
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
    """Everything this process started; the last first."""
    for child in reversed(list(_running)):
        child.signal(signal.SIGTERM)
    for child in reversed(list(_running)):
        child.stop(grace=3.0)


def bound(env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which our own programs end when this process ends, even if it is killed."""
    return {**env, PARENT: str(os.getpid())}


def die_with_parent(every: float = 0.5) -> None:
    """End this process (and its group) once the process named in COTERIE_PARENT is no longer its parent."""
    named = os.environ.pop(PARENT, "")
    if not named.isdigit():
        return

    def watch() -> None:
        while os.getppid() == int(named):
            time.sleep(every)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def superlink(certs: Certs, state: Path, port: int, host: str = "127.0.0.1", wait: float = 60.0) -> Child:
    """Start a SuperLink (TLS, node keys, control closed) with its state under `state`; wait until it answers."""
    certs.check()
    need_flower()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise CoterieError(f"port {port} on {host} cannot be used: {e.strerror}") from e
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    argv = [
        sys.executable, "-m", "coterie.runtimes.flower.transport.superlink", "--host", host, "--port", str(port),
        "--ssl-ca-certfile", str(certs.ca), "--ssl-certfile", str(certs.server), "--ssl-keyfile", str(certs.server_key),
        "--enable-supernode-auth", "--isolation", "process", "--database", str(state / "superlink.db"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    env = {**bound(flower_env(state / "flwr")), "COTERIE_CONTROL_KEY": str(certs.control_key)}
    child = Child("superlink", argv, state / "superlink.log", env).start()
    ready(child, certs, "127.0.0.1" if host in ("0.0.0.0", "::") else host, port, wait)
    return child


def ready(child: Child, certs: Certs, host: str, port: int, wait: float = 60.0) -> None:
    """Wait until the SuperLink answers on its port."""
    context = ssl.create_default_context(cafile=str(certs.ca))
    until = time.monotonic() + wait
    while True:
        if not child.alive:
            child.stop()
            raise CoterieError(f"the SuperLink ended at once; see {child.log}:\n{child.tail()}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"https://{host}:{port}/health", timeout=5, context=context),
        ):
            return
        if time.monotonic() > until:
            child.stop()
            raise CoterieError(f"the SuperLink did not answer on {host}:{port} within {wait:g} s; see {child.log}")
        time.sleep(0.1)


def device(address: str, ca: Path, key: Path, handler: str, options: str, log: Path, *more: str) -> Child:
    """Start a device process; `handler` names a Python function (module:function) that makes the answering function."""
    argv = [
        sys.executable, "-m", "coterie.runtimes.flower.transport.node", "--superlink", address, "--ca", str(ca),
        "--key", str(key), "--handler", handler, "--options", options, *more,
    ]  # fmt: skip
    return Child(key.stem, argv, log, bound(flower_env(log.parent / "flwr"))).start()


def need_flower() -> None:
    """A sentence if Flower is missing."""
    try:
        import flwr  # noqa: F401
    except ImportError as e:
        raise CoterieError('a federation needs the extra "flower": pip install coterie[flower]') from e
