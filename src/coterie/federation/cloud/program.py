"""The cloud's program: a run whose clients connect over the network; it resumes after a crash."""

import json
import logging
import math
import os
import platform
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coterie.config import Engine, RunSettings
from coterie.engine.ledger import Page
from coterie.engine.loop import Progress
from coterie.engine.session import Session, bind, execute, prepare
from coterie.errors import CoterieError
from coterie.federation.cloud.liveness import NodeHistory
from coterie.federation.cloud.runtime import FederationRuntime, WaitingRules
from coterie.federation.device_data import DeviceFederation, example
from coterie.federation.identity.authority import Certs
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.transport import listening
from coterie.methods import build
from coterie.runtimes.base import Runtime
from coterie.storage.atomic import write_atomic

BEAT = 3.0  # seconds between heartbeats in status.json
log = logging.getLogger("coterie.cloud")


@dataclass(frozen=True)
class CloudSettings:
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
    keep: int = 10  # checkpoints
    patience: float | None = 3600.0  # seconds that a run below its quorum waits; None: for ever
    norm_bound: float = 50.0  # times the usual size of an upload; 0: no bound
    quarantine_after: int = 3  # refusals of one sender; 0: never


def open_session(settings: RunSettings, cloud: CloudSettings) -> Session:
    """The method on named data, or on data that only the devices have."""
    check_possible(settings)
    engine = Engine(runtime="federation", data_dir=Path(cloud.data_dir) if cloud.data_dir else None, keep=cloud.keep)
    if not cloud.shape:
        session = prepare(settings, engine)
        check_quorum(cloud.min_clients, len(session.method.ctx.clients))
        return session
    task, n = settings.task or "classification", cloud.classes
    names = tuple(map(str, range(n))) if task in ("classification", "binary", "multilabel") else ()
    targets = 2 if task == "survival" else max(1, n)
    like = example(cloud.shape, names, "float32", None, None, None, task, targets)
    places = settings.federation.clients or cloud.min_clients
    check_quorum(cloud.min_clients, places)
    made = DeviceFederation(like, settings.federation, settings.seed, places)
    return bind(settings, engine, build(settings.method, settings.settings), made)


def check_quorum(min_clients: int, places: int) -> None:
    if min_clients > places:
        raise CoterieError(
            f"min_clients = {min_clients} can never be reached: there are {places} places (clients = {places})"
        )


def check_possible(settings: RunSettings) -> None:
    if settings.warm_start is not None:
        raise CoterieError("warm_start is for simulations: devices of a federation draw the first values from the seed")
    for name, why in (
        ("official", "sends personal models to the cloud"), ("log_updates", "sends updates to the cloud"),
    ):  # fmt: skip
        if getattr(settings, name):
            raise CoterieError(f"{name} = true {why}; in a federation they stay on the devices")


@contextmanager
def open_cloud(
    session: Session,
    cloud: CloudSettings,
    folder: Path,
    patience: WaitingRules,
    seen: Callable[[FederationRuntime], None] = lambda runtime: None,
) -> Iterator[FederationRuntime]:
    """Start the server and yield the runtime that reaches devices through it."""
    certs = Certs(Path(cloud.certs))
    certs.check()
    with listening(certs, cloud.host, cloud.port) as link:
        runtime = FederationRuntime(
            session.method, link, FederationPlan.of(session, cloud.run), certs.roles, folder, patience, seen
        )
        try:
            yield runtime
        finally:
            runtime.close()


def serve(
    session: Session,
    cloud: CloudSettings,
    out: Path,
    *,
    resume: bool = False,
    tell: Callable[[Progress], None] = lambda p: None,
    stopped: Callable[[], bool] = lambda: False,
    from_round: int | None = None,
) -> bool:
    """Run the federation in the folder `out`; returns True when it finished."""
    Certs(Path(cloud.certs)).check()
    if not resume:
        cloud = replace(cloud, run=secrets.token_hex(16))
        write_atomic(out / "cloud.json", json.dumps(asdict(cloud), indent=2).encode())
    status = StatusFile(out / "status.json", session)

    def opened(session: Session, folder: Path, stopped: Callable[[], bool]) -> AbstractContextManager[Runtime]:
        seconds = math.inf if cloud.patience is None else cloud.patience
        patience = WaitingRules(
            cloud.min_clients, cloud.deadline, stopped, seconds=seconds, norm_bound=cloud.norm_bound,
            quarantine_after=cloud.quarantine_after,
        )  # fmt: skip
        return open_cloud(session, cloud, folder, patience, status.seen)

    def told(p: Progress) -> None:
        status.told(p)
        tell(p)

    state, reason = "failed", "the cloud's program was ended"
    try:
        ended = execute(
            session, out, resume=resume, tell=told, say=log.warning, stopped=stopped, opened=opened,
            from_round=from_round,
        )  # fmt: skip
        state, reason = "ended" if ended else "stopped", ""
    except CoterieError as e:
        reason = str(e)
        if e.__cause__ is not None:
            _note(out, e)
        raise
    except Exception as e:
        where = _note(out, e)
        reason = f"the run failed: {type(e).__name__}: {e}; the traceback is in {where}"
        raise CoterieError(reason) from e
    finally:
        with suppress(OSError):  # what has been written before stands
            status.end(state, reason)
    return ended


def _note(out: Path, error: Exception) -> Path:
    """Tracebacks are for a file, sentences for the screen."""
    path = out / "failure.log"
    with suppress(OSError), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as f:
        f.write(time.strftime("%Y-%m-%d %H:%M:%S\n") + "".join(traceback.format_exception(error)) + "\n")
    return path


class StatusFile:
    """status.json: the state of a running federation, for people and programs."""

    def __init__(self, path: Path, session: Session):
        self.path, self.session = path, session
        self._state, self._reason = "waiting", ""
        self._runtime: FederationRuntime | None = None
        self._last = Progress(0, session.settings.rounds, None, 0.0)
        self._found: dict[str, Any] = {}
        self._lock, self._over = threading.Lock(), threading.Event()
        threading.Thread(target=self._beat, name="status", daemon=True).start()

    def seen(self, runtime: FederationRuntime) -> None:
        self._runtime = runtime
        self._state = "paused" if runtime.paused else "running" if runtime.begun else "waiting"
        self._reason = runtime.paused
        self._write(runtime)

    def told(self, progress: Progress) -> None:
        value = self._last.value if progress.value is None else progress.value
        self._last = replace(progress, value=value)

    def end(self, state: str, reason: str = "") -> None:
        self._over.set()
        self._state, self._reason = state, reason
        if self._runtime is not None:
            self._runtime.presence.doing, self._runtime.presence.waiting_for = "", []
            self._write(self._runtime)
            return
        with self._lock:  # it failed before it could ask anybody
            self._found = {**self._about(), "places": 0, "clients": {}, "nodes": {}, "edges": {}, "wire": {}}
            self._put()

    def _write(self, runtime: FederationRuntime) -> None:
        last = self._last
        found = {
            **self._about(), "places": runtime.roster.places, "min_clients": runtime.patience.min_clients,
            "clients": {
                str(c): {"name": entry.name, "via": entry.via, "connected": c in runtime.here}
                for c, entry in sorted(runtime.roster.entries.items())
            },
            "nodes": self._nodes(runtime), "doing": runtime.presence.doing, "waiting_for": runtime.presence.waiting_for,
            "edges": runtime.edges, "wire": runtime.wire.totals, "ledger": _sums(last.bytes),
            "errors": runtime.errors, "quarantine": runtime.quarantine.out,
        }  # fmt: skip
        with self._lock:
            self._found = found
            self._put()

    def _about(self) -> dict[str, Any]:
        last = self._last
        return {
            "state": self._state, "reason": self._reason, "method": self.session.method.card.title,
            "round": last.round, "rounds": last.rounds, "metric": last.metric.name, "value": last.value,
            "text": last.text, "seconds": round(last.seconds, 3), "pid": os.getpid(), "host": platform.node(),
            "errors": [], "ledger": {}, "doing": "", "waiting_for": [], "time": time.time(),
        }  # fmt: skip

    def _put(self) -> None:
        text = json.dumps({**self._found, "heartbeat": time.time()}, indent=1)
        write_atomic(self.path, text.encode(), durable=False)

    def _beat(self) -> None:
        """While the cloud computes, the file says at least that it lives."""
        while not self._over.wait(BEAT):
            with self._lock, suppress(OSError):
                if self._found and time.time() - self._found["time"] > BEAT:
                    self._put()

    @staticmethod
    def _nodes(runtime: FederationRuntime) -> dict[str, dict[str, Any]]:
        """Every node that is registered, was seen or was refused."""
        roles, presence = runtime.known_roles, runtime.presence
        clients = {entry.name: c for c, entry in runtime.roster.entries.items()}
        clients = {**runtime.roster.numbers, **clients}
        out = {}
        left_out = runtime.out
        for name in sorted({*roles, *presence.nodes, *clients, *left_out}):
            seen = presence.nodes.get(name, NodeHistory())
            out[name] = {
                "role": "edge" if name in roles and roles[name].is_edge else "device",
                "client": clients.get(name), "connected": name in presence.connected,
                "last_seen": round(seen.last, 1) or None, "round": seen.round, "uploads": seen.uploads,
                "refusals": seen.refusals, "refused": seen.refused, "out": left_out.get(name, ""),
            }  # fmt: skip
        return out


def _sums(page: Page) -> dict[str, dict[str, int]]:
    return {link: {way: sum(parts.values()) for way, parts in ways.items()} for link, ways in page.items()}


def reopen(out: Path) -> tuple[RunSettings, CloudSettings]:
    """What a federation's folder says about it."""
    try:
        about = json.loads((out / "cloud.json").read_text())
        settings = json.loads((out / "settings.json").read_text())["settings"]
        return RunSettings(**settings), CloudSettings(**{**about, "shape": tuple(about["shape"])})
    except (OSError, ValueError, KeyError, TypeError):
        raise CoterieError(f"{out} holds no federation (cloud.json or settings.json is missing or damaged)") from None
