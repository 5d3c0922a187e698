"""A runtime over the machines of a Ray cluster, with the results of every other runtime.

Every actor holds the method and the federation, built once. Jobs and answers travel as packed values; the items of the
data set are stored once per machine in Ray's object store. So is the state of each client, on the machine where it was
computed last: it moves only when the client trains elsewhere, and comes to this process only for a checkpoint.
"""

import copy
import importlib
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.core.context import State
from coterie.core.states import register
from coterie.engine.codec import Value, pack, unpack
from coterie.engine.messages import Job, Remote, ScoreAnswer, TrainResult
from coterie.errors import CoterieError
from coterie.runtimes.base import JobCost, Setup, Simulation, Work
from coterie.storage.client_states import ClientStates, StateLostError
from coterie.train import native
from coterie.train.clients import Clients
from coterie.train.devices import find_devices

READY = 60.0  # seconds that a new actor has to start before its jobs go to a different one
Reply = tuple[str, np.ndarray | str]  # "r", packed answers; "e", an error message for the user; "x", a traceback


@register
@dataclass(frozen=True)
class Beside(Remote):
    """Placeholder in a message for a state that is stored as a separate object."""

    number: int

    def fetch(self) -> State:
        raise RuntimeError("the state is stored as a separate object")


# ---- in a process of the cluster -------------------------------------------------------------------------------------
class Actor:
    """`x` are the items of the data set, which all actors of a machine share."""

    def __init__(self, clients: Clients, x: np.ndarray, native_wanted: bool, device: str | None, number: int):
        torch.set_num_threads(1)
        native.enable(native_wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the items are read-only; no code writes to them
            items = torch.from_numpy(x)
        clients.federation.dataset = replace(clients.federation.dataset, x=items)
        self.clients, self.device, self.number = clients, device, number

    def hello(self) -> dict[str, str]:
        """Return what must be equal on all machines, or the reason why the device is not there."""
        try:
            devices = find_devices(self.device)
        except CoterieError as e:
            return {"error": str(e)}
        self.clients = self.clients.on(devices[self.number % len(devices)])
        return versions()

    def work(self, what: Work, packed: np.ndarray, *held: np.ndarray) -> Any:
        """Return the reply, followed by one object per job with the client's new state (or None)."""
        jobs: list[Job] = _unpacked(packed)
        left: list[np.ndarray | None] = [None] * len(jobs)
        try:
            ready = [
                replace(j, state=_unpacked(held[j.state.number])) if isinstance(j.state, Beside) else j for j in jobs
            ]
            done: list[Any] = list(self.clients.train(ready) if what == "train" else self.clients.score(ready))
            for i, answer in enumerate(done):
                if isinstance(answer, TrainResult) and answer.state:
                    left[i] = _packed(answer.state)
                    done[i] = replace(answer, state=Beside(i))
            reply: Reply = ("r", _packed(done))
        except CoterieError as e:
            reply = ("e", str(e))
        except Exception:
            reply = ("x", traceback.format_exc())
        return [reply, *left]


def versions() -> dict[str, str]:
    """Return the versions and settings that must be equal on all machines for equal results."""
    return {"coterie": version("coterie"), "torch": torch.__version__, "native": native.native_status()}


def _packed(value: Value) -> np.ndarray:
    return np.asarray(pack(value))


def _unpacked(packed: np.ndarray) -> Value:
    """Unpack a value into memory of its own, because Ray's memory is read-only."""
    return unpack(bytearray(packed), copy=True)


# ---- in the program that runs the rounds -----------------------------------------------------------------------------
class Held(Remote):
    """A client's state in Ray's object store."""

    def __init__(self, ray: Any, ref: Any):
        self.ray, self.ref = ray, ref

    def fetch(self) -> State:
        try:
            state: State = _unpacked(self.ray.get(self.ref))
        except self.ray.exceptions.RayError as e:
            raise StateLostError(f"a client's state was lost with a machine of the cluster ({type(e).__name__})") from e
        return state


class RayRuntime(Simulation):
    """Actors over a cluster; an actor that dies is replaced and its jobs are run again (same keys, same bits)."""

    def __init__(
        self,
        clients: Clients,
        states: ClientStates,
        workers: int | None,
        address: str | None = None,
        cost: JobCost = lambda client: 1,
        device: str | None = None,
    ):
        super().__init__(clients.method, states, cost)
        self.ray, self.device, self._made = _ray(), device, 0
        self._ours = _connect(self.ray, workers, address)
        try:
            processors = int(self.ray.cluster_resources().get("CPU", 0))
            self.workers = workers or max(1, processors)
            if self.workers > processors:
                raise CoterieError(f"workers = {self.workers} is more than the cluster's {processors} processors")
            self._clients = self.ray.put(_without_items(clients))
            self._items = self.ray.put(clients.federation.dataset.x.contiguous().numpy())
            self._class = self.ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Actor)
            self._members: list[Any] = [self._new() for _ in range(self.workers)]
            for member in self._members:
                self._check(self.ray.get(member.hello.remote()))
        except BaseException:
            self.close()
            raise

    def _train(self, jobs: Sequence[Job]) -> list[TrainResult]:
        return self._spread("train", jobs)

    def _score(self, jobs: Sequence[Job]) -> list[ScoreAnswer]:
        return self._spread("score", jobs)

    def _spread(self, what: Work, jobs: Sequence[Job]) -> list[Any]:
        """Return the answers of all jobs, in any order."""
        ray = self.ray
        heaps = self._balanced(jobs, self.workers)
        answers: list[Any] = []
        waiting = {refs[0]: (i, refs) for i, heap in enumerate(heaps) for refs in [self._send(i, what, heap)]}
        deaths = 0
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            i, refs = waiting.pop(ready[0])
            try:
                kind, answer = ray.get(refs[0])
            except ray.exceptions.RayTaskError as e:
                if isinstance(e.cause, ray.exceptions.ObjectLostError):
                    raise StateLostError("clients' states were lost with a machine of the cluster") from e
                raise
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as e:
                deaths += 1
                if deaths > 2 * len(heaps):
                    raise CoterieError("the cluster's processes keep dying; is there enough memory?") from e
                self._replace(i)
                refs = self._send(i, what, heaps[i])
                waiting[refs[0]] = (i, refs)
                continue
            if kind == "e":
                raise CoterieError(answer)
            if kind == "x":
                raise RuntimeError(answer)
            answers += self._with_states(_unpacked(answer), refs[1:])
        return answers

    def close(self) -> None:
        for member in getattr(self, "_members", []):
            with suppress(Exception):
                self.ray.kill(member)
        if self._ours:
            self.ray.shutdown()

    def _send(self, i: int, what: Work, jobs: Sequence[Job]) -> list[Any]:
        """Send jobs to an actor; return references to its reply and to each job's new state."""
        held: list[Any] = []
        sent: list[Job] = []
        for job in jobs:
            if isinstance(job.state, Held):
                sent.append(replace(job, state=Beside(len(held))))
                held.append(job.state.ref)
            else:
                sent.append(job)
        refs = self._members[i].work.options(num_returns=1 + len(jobs)).remote(what, _packed(sent), *held)
        return list(refs) if isinstance(refs, list) else [refs]

    def _with_states(self, answers: list[Any], states: list[Any]) -> list[Any]:
        """Replace states by references to the machines that computed them."""
        return [
            replace(a, state=Held(self.ray, ref)) if isinstance(a, TrainResult) and isinstance(a.state, Beside) else a
            for a, ref in zip(answers, states, strict=True)
        ]

    # ---- actors ----------------------------------------------------------------------------------------------
    def _new(self) -> Any:
        self._made += 1
        return self._class.remote(self._clients, self._items, native.enabled(), self.device, self._made - 1)

    def _replace(self, i: int) -> None:
        """Start a new actor in this place; if the cluster has no room left, the remaining actors do its work."""
        new = self._new()
        hello = new.hello.remote()
        ready, _ = self.ray.wait([hello], timeout=READY)
        with suppress(self.ray.exceptions.RayActorError):
            if ready:
                self._check(self.ray.get(hello))
                self._members[i] = new
                return
        self.ray.kill(new)
        others = [m for j, m in enumerate(self._members) if j != i]
        if not others:
            raise CoterieError(f"the cluster has had no room for a process for {READY:g} seconds")
        self._members[i] = others[i % len(others)]

    def _check(self, there: dict[str, str]) -> None:
        if "error" in there:
            raise CoterieError(f"on a machine of the cluster: {there['error']}")
        own_versions = versions()
        for name, value in own_versions.items():
            if there[name] != value:
                raise CoterieError(f'a machine of the cluster has "{there[name]}" ({name}) where this has "{value}"')


@contextmanager
def open_ray(session: Setup, folder: Path, should_stop: Callable[[], bool]) -> Iterator[RayRuntime]:
    """Join the cluster at the session's address, or start one on this machine."""
    torch.set_num_threads(1)
    e = session.engine
    clients, states = session.clients(), session.states(folder)
    with closing(RayRuntime(clients, states, e.workers, e.address, session.cost, e.device)) as runtime:
        yield runtime


def _without_items(clients: Clients) -> Clients:
    """Return the clients with an empty data set, because the items are sent separately, once per machine."""
    federation = copy.copy(clients.federation)
    federation.dataset = replace(federation.dataset, x=federation.dataset.x[:0].clone())
    return replace(clients, federation=federation)


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a notice about accelerators
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise CoterieError("runtime = ray needs Ray; install it with `pip install 'coterie[ray]'`") from None


def _connect(ray: Any, workers: int | None, address: str | None) -> bool:
    """Join or start a cluster; return False if the program had joined one before, which it then also leaves itself."""
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    if address is None:
        options["num_cpus"] = workers
    else:
        _reach(address)
        options["address"] = address
        del options["include_dashboard"]
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as e:
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        what = "Ray could not be started here" if address is None else f"there is no Ray cluster at address = {address}"
        raise CoterieError(f"{what} ({first})") from None
    finally:
        with suppress(ValueError):  # not the main thread; Ray puts its own handler there otherwise
            signal.signal(signal.SIGTERM, before)
    return True


def _reach(address: str) -> None:
    """Raise CoterieError if the address does not answer, because Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as e:
            raise CoterieError(f"there is no Ray cluster at address = {address} ({e.strerror or e})") from None
