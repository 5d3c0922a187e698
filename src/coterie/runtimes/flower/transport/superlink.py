"""A SuperLink as a process of this program: started, started again when it dies, and ended with us.

Facts about Flower 1.41: `flower-superlink` listens on one port for all its interfaces; with `--isolation process` it
starts no further processes; its state is in memory unless `--database FILE` is given (SQLite: registered nodes,
messages and payload chunks then survive its death, and payloads lie on disk instead of in its memory).
"""

import contextlib
import logging
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.errors import CoterieError
from coterie.runtimes.flower.certs import Certs
from coterie.runtimes.flower.processes import Child, bound
from coterie.runtimes.flower.transport.base import address, flower_env, wait_for_port
from coterie.runtimes.flower.transport.http import KEY

FOLLOW = 10.0  # seconds the SuperLink of a program that was just killed may take to follow it
log = logging.getLogger("coterie.cloud")


@contextmanager
def superlink(certs: Certs, state: Path, host: str, port: int) -> Iterator[Child]:
    """A SuperLink that is started again whenever it dies, and ends with us."""
    child = start(certs, state, host, port, FOLLOW)
    over = threading.Event()

    def watch() -> None:
        told = False
        while not over.wait(0.5):
            if not child.alive:
                log.warning("the SuperLink died; starting it again")
                child.kill()
                with contextlib.suppress(OSError):
                    child.start()
            try:
                if certs.switch():
                    log.info("the new authority has taken over; devices need the ca.crt that was made with it")
            except OSError as e:
                if not told:
                    log.warning("the new authority cannot take over: %s cannot be written (%s)", certs.root, e.strerror)
                told = True

    watcher = threading.Thread(target=watch, name="superlink-watch", daemon=True)
    watcher.start()
    try:
        yield child
    finally:
        over.set()
        watcher.join(5)
        child.stop()


def start(certs: Certs, state: Path, host: str, port: int, patience: float = 0.0) -> Child:
    """Start a SuperLink (TLS, node keys, control closed) with its state under `state`; wait until it answers."""
    certs.check()
    certs.switch()
    for warning in certs.check_dates():
        log.warning("%s", warning)
    wait_for_port(host, port, patience)
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    argv = [
        sys.executable, "-m", "coterie.runtimes.flower.transport.guard", "--host", host, "--port", str(port),
        "--ssl-ca-certfile", str(certs.ca), "--ssl-certfile", str(certs.server), "--ssl-keyfile", str(certs.server_key),
        "--enable-supernode-auth", "--isolation", "process", "--database", str(state / "superlink.db"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    env = {**bound(flower_env(state / "flwr")), KEY: str(certs.control_key)}
    child = Child("superlink", argv, state / "superlink.log", env).start()
    _answers(child, certs, address(host, port))
    return child


def _answers(child: Child, certs: Certs, where: str, wait: float = 240.0) -> None:
    """Wait until the SuperLink answers on its port."""
    context = ssl.create_default_context(cafile=str(certs.ca))
    until = time.monotonic() + wait
    while True:
        if not child.alive:
            child.stop()
            raise CoterieError(f"the SuperLink ended at once; see {child.log}:\n{child.tail()}")
        try:
            with urllib.request.urlopen(f"https://{where}/health", timeout=5, context=context):
                return
        except OSError as e:
            if "CERTIFICATE_VERIFY_FAILED" in str(e):
                child.stop()
                raise CoterieError(f"the certificate {certs.server} does not hold ({e}); renew it") from e
        if time.monotonic() > until:
            child.stop()
            raise CoterieError(f"the SuperLink did not answer on {where} within {wait:g} s; see {child.log}")
        time.sleep(0.1)
