"""Worker processes on one machine: forked, one thread each, values handed over in shared memory."""

import logging
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.engine import codec
from coterie.engine.codec import Value
from coterie.engine.messages import Job, ScoreAnswer, TrainResult
from coterie.errors import CoterieError
from coterie.runtimes.base import JobCost, Setup, Simulation, Work
from coterie.runtimes.inline import Inline
from coterie.storage.client_states import ClientStates
from coterie.train.clients import Clients
from coterie.train.devices import CPU, find_devices, forks_can_train, may_fork

log = logging.getLogger("coterie")


class Arena:
    """Shared memory that two forked processes write and read in turn; it grows with the values written."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("coterie")
        else:
            with tempfile.TemporaryFile() as f:
                self._file = os.dup(f.fileno())
        self._map: mmap.mmap | None = None

    def write(self, value: Value) -> int:
        """Write the value and return its size, which the other process needs to read it."""
        made = codec.encode(value)
        if self._map is None or made.size > len(self._map):
            os.ftruncate(self._file, made.size + made.size // 4)
        codec.write_into(made, self._mapped(made.size))
        return made.size

    def read(self, size: int, copy: bool = False) -> Value:
        """Return the value; unless it is copied, its tensors are valid until the next write."""
        return codec.unpack(self._mapped(size), copy)

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or size > len(self._map):
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return self._map

    def close(self) -> None:
        os.close(self._file)


class Worker(NamedTuple):
    process: Any
    pipe: Any


class Workers(Simulation):
    """Forked workers; a worker that dies is replaced and its jobs are run again (same keys, same bits)."""

    def __init__(
        self,
        clients: Clients,
        states: ClientStates,
        workers: int,
        cost: JobCost = lambda client: 1,
        devices: Sequence[torch.device] = (CPU,),
    ):
        if multiprocessing.current_process().daemon:
            raise CoterieError("a daemonic process cannot start workers; run with workers=1 in it")
        super().__init__(clients.method, states, cost)
        self.clients, self.workers, self.devices = clients, workers, devices
        self._fork = multiprocessing.get_context("fork")
        self._arenas = [(Arena(), Arena()) for _ in range(workers)]
        self._members = [self._start(i) for i in range(workers)]

    def _train(self, jobs: Sequence[Job]) -> list[TrainResult]:
        return self._spread("train", jobs)

    def _score(self, jobs: Sequence[Job]) -> list[ScoreAnswer]:
        return self._spread("score", jobs)

    def _start(self, i: int) -> Worker:
        ours, theirs = self._fork.Pipe()
        device = self.devices[i % len(self.devices)]
        process = self._fork.Process(
            target=_serve, args=(self.clients, device, theirs, ours, *self._arenas[i]), daemon=True
        )
        process.start()
        theirs.close()
        return Worker(process, ours)

    def _spread(self, what: Work, jobs: Sequence[Job]) -> list[Any]:
        """Return the answers of all jobs, in any order."""
        heaps = self._balanced(jobs, self.workers)
        answers: list[Any] = []
        deaths = 0
        waiting = {self._send(i, what, heap): i for i, heap in enumerate(heaps)}
        while waiting:
            ready: list[Any] = multiprocessing.connection.wait(list(waiting))
            for pipe in ready:
                i = waiting.pop(pipe)
                try:
                    kind, message = pipe.recv_bytes(), pipe.recv_bytes()
                except (EOFError, OSError):
                    deaths += 1
                    if deaths > 2 * len(heaps):
                        raise CoterieError("worker processes keep dying; is there enough memory?") from None
                    self._replace(i)
                    waiting[self._send(i, what, heaps[i])] = i
                    continue
                if kind == b"e":
                    raise CoterieError(message.decode())
                if kind == b"x":
                    raise RuntimeError(message.decode())
                answers += self._arenas[i][1].read(int(message), copy=True)
        return answers

    def _send(self, i: int, what: Work, jobs: Sequence[Job]) -> Any:
        size = self._arenas[i][0].write(jobs)
        message = f"{what} {size}".encode()
        for _ in range(3):
            try:
                self._members[i].pipe.send_bytes(message)
                return self._members[i].pipe
            except OSError:
                self._replace(i)
        raise CoterieError("worker processes keep dying; is there enough memory?")

    def _replace(self, i: int) -> None:
        self._members[i].pipe.close()
        self._members[i].process.join()
        self._members[i] = self._start(i)

    def close(self) -> None:
        for member in self._members:  # all pipes first: a later worker holds copies of earlier pipes
            member.pipe.close()
        for member in self._members:
            member.process.join(2)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
        for pair in self._arenas:
            for arena in pair:
                arena.close()


def _serve(clients: Clients, device: torch.device, pipe: Any, parents_end: Any, inbox: Arena, outbox: Arena) -> None:
    """Run jobs in a worker process until the parent's end of the pipe closes."""
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    while True:
        try:
            what, size = pipe.recv_bytes().decode().split()
        except (EOFError, OSError):
            os._exit(0)
        try:
            clients = clients.on(device)
            jobs = inbox.read(int(size))
            done: Value = clients.train(jobs) if what == "train" else clients.score(jobs)
            kind, reply = b"r", str(outbox.write(done)).encode()
        except CoterieError as e:
            kind, reply = b"e", str(e).encode()
        except Exception:
            kind, reply = b"x", traceback.format_exc().encode()
        try:
            pipe.send_bytes(kind)
            pipe.send_bytes(reply)
        except OSError:
            os._exit(0)


@contextmanager
def open_local(session: Setup, folder: Path, should_stop: Callable[[], bool]) -> Iterator[Simulation]:
    """Open worker processes, or compute in this process if one worker is enough or processes cannot be forked."""
    torch.set_num_threads(1)
    devices = find_devices(session.engine.device)
    own = len(devices) if devices != (CPU,) else os.cpu_count() or 1
    workers = session.engine.workers or own
    clients, states = session.clients(), session.states(folder)
    runtime: Simulation
    if workers > 1 and can_fork() and may_fork(devices) and _forks_train():
        runtime = Workers(clients, states, workers, session.cost, devices)
    else:
        runtime = Inline(clients, states, session.cost, devices[0])
    with closing(runtime):
        yield runtime


def _forks_train() -> bool:
    able = forks_can_train()
    if not able:
        log.warning(
            "this process has computed gradients, and on a machine with a GPU PyTorch then refuses them in worker "
            "processes; the run continues in one process (a fresh process can have workers)"
        )
    return able


def can_fork() -> bool:
    return "fork" in multiprocessing.get_all_start_methods()
