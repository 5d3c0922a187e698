"""The cloud's program: a SuperLink, a roster, and the round loop over both; it goes on where a crash left it."""

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie import checkpoint, codec
from coterie.config import Engine, RunSettings
from coterie.errors import CoterieError
from coterie.folder import Folder
from coterie.loop import Loop, Progress
from coterie.method import ClientId
from coterie.methods import build
from coterie.runtimes.flower import processes
from coterie.runtimes.flower.certs import Certs
from coterie.runtimes.flower.cloud import FlowerRuntime
from coterie.runtimes.flower.own_data import OwnData, example
from coterie.runtimes.flower.plan import Plan
from coterie.runtimes.flower.roster import Roster
from coterie.runtimes.flower.transport.link import FlowerLink
from coterie.runtimes.states import Store
from coterie.session import Session, bind, make_loop, prepare

FOREVER = 10.0**9
log = logging.getLogger("coterie.cloud")


@dataclass(frozen=True)
class Cloud:
    """How the cloud is reached and how long it waits; kept in cloud.json for whoever continues the run."""

    certs: str
    host: str = "0.0.0.0"
    port: int = 9092
    min_clients: int = 2
    deadline: float = 600.0
    shape: tuple[int, ...] = ()  # of the devices' own data; empty: named data
    classes: int = 0
    data_dir: str | None = None
    run: str = ""


class Elsewhere(Store):
    """The cloud's view of client states: the round of the newest one it counts on, and nothing else."""

    def handle(self, client: ClientId) -> Any:
        """The round, in place of the state."""
        return int(self.version[client]) if client < len(self.version) and self.version[client] >= 0 else None

    def get(self, client: ClientId) -> Any:
        return self.handle(client)

    def put(self, client: ClientId, state: Any, round: int) -> None:
        self.version[client] = round

    def verify(self) -> None:
        pass

    def sweep(self, kept: list[np.ndarray]) -> None:
        pass


def open_session(settings: RunSettings, cloud: Cloud) -> Session:
    """The method on named data, or on data that only the devices have."""
    _possible(settings)
    engine = Engine(data_dir=Path(cloud.data_dir) if cloud.data_dir else None)
    if not cloud.shape:
        return prepare(settings, engine)
    like = example(cloud.shape, tuple(map(str, range(cloud.classes))), "float32", None, None, None)
    places = settings.federation.clients or cloud.min_clients
    made = OwnData(like, settings.federation, settings.seed, places)
    return bind(settings, engine, build(settings.method, settings.settings), made)


def _possible(settings: RunSettings) -> None:
    for name, why in (
        ("official", "sends personal models to the cloud"), ("log_updates", "sends updates to the cloud"),
    ):  # fmt: skip
        if getattr(settings, name):
            raise CoterieError(f"{name} = true {why}; in a federation they stay on the devices")


def serve(
    session: Session, cloud: Cloud, out: Path, *, resume: bool = False,
    tell: Callable[[Progress], None] = lambda p: None, stopped: Callable[[], bool] = lambda: False,
) -> bool:  # fmt: skip
    """Run the federation in the folder `out`; True when it came to its end."""
    certs = Certs(Path(cloud.certs))
    certs.check()
    folder = Folder(out)
    try:
        if not resume:
            cloud = replace(cloud, run=secrets.token_hex(16))
            folder.write_settings(session.described())
            codec.write_atomic(out / "cloud.json", json.dumps(asdict(cloud), indent=2).encode())
        address = f"{'127.0.0.1' if cloud.host in ('0.0.0.0', '::') else cloud.host}:{cloud.port}"
        with superlink(certs, out / "superlink", cloud.host, cloud.port) as child, FlowerLink(address, certs) as link:
            return _drive(session, cloud, folder, link, child, resume, tell, stopped)
    except OSError as e:
        raise CoterieError(f"writing to {out} failed ({e.strerror or e}); what was written before is kept") from e
    finally:
        folder.close()


def _drive(
    session: Session, cloud: Cloud, folder: Folder, link: FlowerLink, child: processes.Child, resume: bool,
    tell: Callable[[Progress], None], stopped: Callable[[], bool],
) -> bool:  # fmt: skip
    plan = Plan.of(session, cloud.run)
    places = len(session.method.ctx.clients)
    roster = Roster(folder.path / "roster.json", places)
    status = Status(folder.path / "status.json", session, child)

    def declared(client: ClientId, round: int) -> int:
        seat = roster.seats.get(client)
        labels = seat.labels if seat else session.method.ctx.classes
        return session.method.payload_of(loop.server, client, labels, round).up

    runtime = FlowerRuntime(
        link, plan, session.method, roster, cloud.deadline, declared, cloud.min_clients, stopped, lambda: seen()
    )
    loop = make_loop(session, folder, runtime)
    loop.tier = runtime
    loop.store = Elsewhere(folder.path, places, disk=True)
    loop.cost = lambda client: 1
    loop.schedule = replace(loop.schedule, checkpoint_every=1, newcomers=())

    def seen() -> None:
        loop.schedule = replace(loop.schedule, newcomers=tuple(roster.newcomers))
        status.write(loop, runtime)

    if resume:
        for complaint in checkpoint.resume(loop):
            log.warning("%s", complaint)
        status.round = max(0, loop.done)
        runtime.wire.restore(folder.path / "wire.jsonl", loop.done)
    log.info("waiting for %s clients on %s", cloud.min_clients, link.address)
    if not runtime.wait(cloud.min_clients, FOREVER):
        return False
    status.state = "running"

    def told(p: Progress) -> None:
        status.round, status.seconds = p.round, p.seconds
        status.accuracy = p.accuracy if p.accuracy is not None else status.accuracy
        runtime.wire.close_round_of(folder.path / "wire.jsonl", p.round)
        status.write(loop, runtime)
        tell(p)

    ended = loop.run(told, stopped)
    status.state = "ended" if ended else "stopped"
    status.write(loop, runtime)
    return ended


class Status:
    """status.json: what a person or another program wants to know of a running federation."""

    def __init__(self, path: Path, session: Session, superlink: processes.Child):
        self.path, self.session, self.superlink = path, session, superlink
        self.state, self.round, self.seconds = "waiting", 0, 0.0
        self.accuracy: float | None = None

    def write(self, loop: Loop, runtime: FlowerRuntime) -> None:
        seats = runtime.roster.seats
        found = {
            "state": self.state, "method": self.session.method.title, "round": self.round,
            "rounds": self.session.settings.rounds, "accuracy": self.accuracy, "seconds": round(self.seconds, 3),
            "places": runtime.roster.places, "pid": os.getpid(),
            "superlink": self.superlink.pid if self.superlink.alive else None,
            "clients": {
                str(c): {"name": s.name, "via": s.via, "connected": c in runtime.here} for c, s in sorted(seats.items())
            },
            "edges": runtime.edges, "wire": runtime.wire.totals, "ledger": _sums(loop.ledger.totals),
            "errors": runtime.errors, "time": time.time(),
        }  # fmt: skip
        codec.write_atomic(self.path, json.dumps(found, indent=1).encode(), durable=False)


def _sums(book: dict[str, dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    return {link: {way: sum(parts.values()) for way, parts in ways.items()} for link, ways in book.items()}


@contextmanager
def superlink(certs: Certs, state: Path, host: str, port: int) -> Iterator[processes.Child]:
    """A SuperLink that is started again whenever it dies, and ends with us."""
    until = time.monotonic() + 10
    while True:  # the SuperLink of a program that was just killed takes a moment to follow it
        try:
            child = processes.superlink(certs, state, port, host)
            break
        except CoterieError as e:
            if "cannot be used" not in str(e) or time.monotonic() > until:
                raise
            time.sleep(0.3)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if not child.alive:
                log.warning("the SuperLink died; starting it again")
                child.kill()
                with contextlib.suppress(OSError):
                    child.start()

    watcher = threading.Thread(target=watch, name="superlink-watch", daemon=True)
    watcher.start()
    try:
        yield child
    finally:
        over.set()
        watcher.join(5)
        child.stop()


def reopen(out: Path) -> tuple[RunSettings, Cloud]:
    """What a federation's folder says about it."""
    try:
        about = json.loads((out / "cloud.json").read_text())
        settings = json.loads((out / "settings.json").read_text())["settings"]
    except (OSError, ValueError, KeyError):
        raise CoterieError(f"{out} holds no federation (cloud.json or settings.json is missing or damaged)") from None
    return RunSettings(**settings), Cloud(**{**about, "shape": tuple(about["shape"])})
