"""Worker processes on one machine: forked, one thread each, values handed over in shared memory."""

import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from coterie.codec import Value, join, split
from coterie.errors import CoterieError
from coterie.flat import fill, lay_out, view
from coterie.train.clients import Device, clone_value

ARENA = 16 << 30  # address space of one arena; only pages that were written cost memory


class Runtime(Protocol):
    """Runs requests, one per worker, and returns the replies in the same order."""

    workers: int

    def run(self, requests: Sequence[Value]) -> list[Value]: ...
    def close(self) -> None: ...


class Inline:
    """No processes: everything here, with the same hand-over by value."""

    workers = 1

    def __init__(self, device: Device):
        self.device = device

    def run(self, requests: Sequence[Value]) -> list[Value]:
        return [clone_value(self.device.handle(clone_value(r))) for r in requests]

    def close(self) -> None:
        pass


class Arena:
    """Shared memory that two processes of one fork write and read in turn."""

    def __init__(self) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.map = mmap.mmap(-1, ARENA, flags=flags)

    def write(self, value: Value) -> bytes:
        """Lay the tensors down and return the small message that finds them again."""
        skeleton, tensors = split(value)
        places, size = lay_out(tensors)
        if size > ARENA:
            raise CoterieError("one message is larger than 16 GiB; use fewer clients per round or more workers")
        fill(self.map, tensors, places)
        return json.dumps([skeleton, places]).encode()

    def read(self, message: bytes) -> Value:
        """The value, as views into the arena: valid until the next write."""
        skeleton, places = json.loads(message)
        return join(skeleton, [view(self.map, place) for place in places])


class Pool:
    """Forked workers; one that dies is replaced and its request is run again (same keys, same bits)."""

    def __init__(self, device: Device, workers: int):
        self.device, self.workers = device, workers
        self._fork = multiprocessing.get_context("fork")
        self._arenas = [(Arena(), Arena()) for _ in range(workers)]
        self._members: list[tuple[Any, Any]] = [self._start(i) for i in range(workers)]

    def _start(self, i: int) -> tuple[Any, Any]:
        ours, theirs = self._fork.Pipe()
        process = self._fork.Process(target=_serve, args=(self.device, theirs, ours, *self._arenas[i]), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def run(self, requests: Sequence[Value]) -> list[Value]:
        replies: list[Value] = [None] * len(requests)
        deaths = 0
        waiting: dict[Any, int] = {}
        for i, request in enumerate(requests):
            waiting[self._send(i, request)] = i
        while waiting:
            ready: list[Any] = multiprocessing.connection.wait(list(waiting))
            for pipe in ready:
                i = waiting.pop(pipe)
                try:
                    kind, message = pipe.recv_bytes(), pipe.recv_bytes()
                except (EOFError, ConnectionResetError):
                    deaths += 1
                    if deaths > 2 * len(requests):
                        raise RuntimeError("worker processes keep dying (out of memory?)") from None
                    self._members[i][0].join()
                    self._members[i] = self._start(i)
                    waiting[self._send(i, requests[i])] = i
                    continue
                if kind == b"e":
                    raise CoterieError(message.decode())
                if kind == b"x":
                    raise RuntimeError(message.decode())
                replies[i] = clone_value(self._arenas[i][1].read(message))
        return replies

    def _send(self, i: int, request: Value) -> Any:
        pipe = self._members[i][1]
        message = self._arenas[i][0].write(request)
        try:
            pipe.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            self._members[i] = self._start(i)
            pipe = self._members[i][1]
            pipe.send_bytes(message)
        return pipe

    def close(self) -> None:
        for _, pipe in self._members:  # all of them first: a later worker holds copies of the earlier ones' pipes
            pipe.close()
        for process, _ in self._members:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(device: Device, pipe: Any, parents_end: Any, inbox: Arena, outbox: Arena) -> None:
    """The life of a worker: it ends when the parent's end of the pipe closes."""
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            reply = outbox.write(device.handle(inbox.read(message)))
            kind = b"r"
        except CoterieError as e:
            kind, reply = b"e", str(e).encode()
        except Exception:
            kind, reply = b"x", traceback.format_exc().encode()
        try:
            pipe.send_bytes(kind)
            pipe.send_bytes(reply)
        except (BrokenPipeError, OSError):
            os._exit(0)


def start(device: Device, workers: int) -> Runtime:
    """Processes where the system can fork, else everything in this one."""
    torch.set_num_threads(1)
    if workers > 1 and "fork" in multiprocessing.get_all_start_methods():
        return Pool(device, workers)
    return Inline(device)
