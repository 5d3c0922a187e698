"""What both transports have in common: what callers see, errors, and the environment that Flower is run in.

Nothing here needs Flower or gRPC to be installed.
"""

import fcntl
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import numpy as np

from coterie.errors import CoterieError

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
Answering = Callable[[str, int, memoryview | None, memoryview], Buffer]  # (kind, round, shared, own) -> answer
MAX_PAYLOAD = 8 * 2**30  # bytes of one payload, unless told otherwise


class UnreachableError(CoterieError):
    """The other side does not answer now; trying again later makes sense."""


class UntrustedError(UnreachableError):
    """The certificate of the other side does not hold: it is out of date, or ours to check it with is."""


class RefusedError(CoterieError):
    """The server does not know this key, node, run or task (any more)."""


class Bell(threading.Event):
    """An event that also calls who asked for it when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = False  # will it be set in a moment?
        self._calls: list[Callable[[], object]] = []

    def set_after(self, seconds: float) -> None:
        """Set it a moment later, on another thread."""
        self.expected = True
        timer = threading.Timer(seconds, self.set)
        timer.daemon = True
        timer.start()

    def listen(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        if self.is_set():
            call()

    def set(self) -> None:
        super().set()
        for call in self._calls:
            call()


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of one exchange with one node: the payloads, and all that went over its link for them."""

    payload_down: int
    payload_up: int
    total_down: int
    total_up: int


class Cause(Enum):
    """Why a node gave no answer that counts."""

    ABSENT = "absent"  # it is not connected
    LATE = "late"  # it is, and the time is over
    DECLINED = "declined"  # it answered with a sentence instead
    WRONG = "wrong"  # what it sent is no answer to the question


@dataclass(frozen=True)
class Failure:
    cause: Cause
    why: str  # for a person, with the node's name

    @property
    def passing(self) -> bool:
        """Is nothing wrong with the node but that it is not there, or not in time?"""
        return self.cause in (Cause.ABSENT, Cause.LATE)


class NodeReplies(NamedTuple):
    """The result of a request, by node: answers, reasons for missing answers, and traffic."""

    answers: dict[str, memoryview]
    errors: dict[str, Failure]
    traffic: dict[str, LinkBytes]


def by_name(found: dict[str, T]) -> dict[str, T]:
    return dict(sorted(found.items()))


def room(length: int) -> memoryview:
    """So many bytes from a multiple of 64 on, so that tensors in it lie as they do in torch's own memory."""
    raw: Any = np.empty(length + 63, np.uint8)
    start = -raw.ctypes.data % 64
    return memoryview(raw[start : start + length])


def lock_key(key: Path) -> TextIO | None:
    """One process per key and host: the locked file beside the key; None if there is no place for it."""
    try:
        memory = key.with_suffix(".node").open("a+")
    except OSError:
        return None
    try:
        fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        memory.close()
        raise CoterieError(f"another process is already connected with the key {key}") from e
    return memory


def address(host: str, port: int) -> str:
    """Where this host itself reaches its server."""
    return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"


def wait_for_port(host: str, port: int, patience: float) -> None:
    """Until the port is free; a sentence if it stays in use."""
    until = time.monotonic() + patience
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                return s.bind((host, port))
            except OSError as e:
                if time.monotonic() > until:
                    raise CoterieError(f"port {port} on {host} cannot be used: {e.strerror}") from e
        time.sleep(0.3)
