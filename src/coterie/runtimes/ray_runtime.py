"""The same run over the machines of a Ray cluster.

Every actor holds a device that was built once. Requests and replies are packed values; the items of the data set lie
once per machine in Ray's object store, and so does the state of each client, on the machine where it was computed last:
it moves only when the client trains elsewhere, and comes here only to be written into a checkpoint.
"""

import importlib
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from coterie import native
from coterie.codec import Value
from coterie.errors import CoterieError
from coterie.flat import pack, unpack
from coterie.method import State
from coterie.runtimes.ray_member import Member, fingerprint, without_items
from coterie.runtimes.states import Remote, StateLostError
from coterie.train.clients import Device

READY = 60.0  # seconds a new actor gets to start before its work goes to another


class Held(Remote):
    """A client's state in Ray's object store."""

    def __init__(self, ray: Any, ref: Any):
        self.ray, self.ref = ray, ref

    def fetch(self) -> State:
        try:
            state: State = unpack(self.ray.get(self.ref))
        except self.ray.exceptions.RayError as e:
            raise StateLostError(f"a client's state was lost with a machine of the cluster ({type(e).__name__})") from e
        return state


class RayRuntime:
    """Actors over a cluster; one that dies is replaced and its request is run again (same keys, same bits)."""

    def __init__(self, device: Device, workers: int | None, address: str | None = None):
        self.ray = _ray()
        self._ours = _connect(self.ray, workers, address)
        try:
            processors = int(self.ray.cluster_resources().get("CPU", 0))
            self.workers = workers or max(1, processors)
            if self.workers > processors:
                raise CoterieError(f"workers = {self.workers} is more than the cluster's {processors} processors")
            self._device = self.ray.put(without_items(device))
            self._items = self.ray.put(device.federation.dataset.x.contiguous().numpy())
            self._class = self.ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Member)
            self._members: list[Any] = [self._new() for _ in range(self.workers)]
            for member in self._members:
                self._check(self.ray.get(member.hello.remote()))
        except BaseException:
            self.close()
            raise

    def run(self, requests: Sequence[Value]) -> list[Value]:
        ray = self.ray
        replies: list[Value] = [None] * len(requests)
        waiting = {refs[0]: (i, refs) for i, r in enumerate(requests) for refs in [self._send(i, r)]}
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
                if deaths > 2 * len(requests):
                    raise RuntimeError("the cluster's processes keep dying (out of memory?)") from e
                self._replace(i)
                refs = self._send(i, requests[i])
                waiting[refs[0]] = (i, refs)
                continue
            if kind == "e":
                raise CoterieError(answer)
            if kind == "x":
                raise RuntimeError(answer)
            replies[i] = self._with_states(unpack(answer), refs[1:])
        return replies

    def close(self) -> None:
        for member in getattr(self, "_members", []):
            with suppress(Exception):
                self.ray.kill(member)
        if self._ours:
            self.ray.shutdown()

    # ---- requests --------------------------------------------------------------------------------------------
    def _send(self, i: int, request: Value) -> list[Any]:
        """Hand a request over; references to its reply and to each job's new state."""
        held: list[Any] = []
        jobs: list[dict[str, Any]] = []
        for job in request["jobs"]:
            if isinstance(job.get("state"), Held):
                job = {**job, "state": None, "held": len(held)}
                held.append(request["jobs"][len(jobs)]["state"].ref)
            jobs.append(job)
        packed = pack({**request, "jobs": jobs})
        call = self._members[i].handle.options(num_returns=1 + len(jobs))
        refs = call.remote(packed, *held)
        return list(refs) if isinstance(refs, list) else [refs]

    def _with_states(self, answers: list[Value], states: list[Any]) -> list[Value]:
        for answer in answers:
            if isinstance(answer, dict) and "held" in answer:
                answer["state"] = Held(self.ray, states[answer.pop("held")])
        return answers

    # ---- actors ----------------------------------------------------------------------------------------------
    def _new(self) -> Any:
        return self._class.remote(self._device, self._items, native.enabled())

    def _replace(self, i: int) -> None:
        """A new actor in this place; where the cluster has no room left, another one does its work too."""
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
            raise RuntimeError(f"the cluster has had no room for a process for {READY:g} seconds")
        self._members[i] = others[i % len(others)]

    def _check(self, there: dict[str, str]) -> None:
        here = fingerprint()
        for name, value in here.items():
            if there[name] != value:
                raise CoterieError(f'a machine of the cluster has "{there[name]}" ({name}) where this has "{value}"')


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing about a run is reported to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a notice about accelerators
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise CoterieError("runtime = ray needs Ray, which `pip install 'coterie[ray]'` brings") from None


def _connect(ray: Any, workers: int | None, address: str | None) -> bool:
    """Join or start a cluster; False if one was joined before by somebody else, who also leaves it."""
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
    """Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as e:
            raise CoterieError(f"there is no Ray cluster at address = {address} ({e.strerror or e})") from None
