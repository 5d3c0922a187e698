"""What a stranger, and a node that misbehaves, can take of a SuperLink's memory, connections and disk.

A stranger gets no byte of a body read: whether the key of a request is registered and its signature right is decided by
its headers. A registered node has a few requests at a time, and for every message it may answer only as many bytes as
the cloud has allowed.
"""

import asyncio
import binascii
import contextlib
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

LARGEST_REQUEST = 8 * 2**20  # Flower sends chunks of 5 MB, and a body is held in memory while it is read
LARGEST_OF_OURS = 64 * 2**20  # the cloud announces the messages to all nodes in one request
REQUESTS = 4  # of one key at a time: a node sends one, and heartbeats
BODIES = 256 * 2**20  # bytes of bodies at a time, of all nodes
SLOWEST = 20_000  # bytes per second at which a body must arrive,
PATIENCE = 30.0  # after so many seconds
CONNECTIONS = 4096  # at a time,
PER_ADDRESS = 1024  # and from one address, behind which many devices may be
FIRST_REQUEST = 20.0  # seconds a new connection has for its first request
AHEAD, BEHIND = 5.0, 305.0  # seconds a node's clock may differ, as in Flower
KEY, SIGNATURE, TIME = b"flwr-public-key", b"flwr-signature", b"flwr-timestamp"
ALLOWED = "x-coterie-largest-answer"  # header in which the cloud says how many bytes an answer may have

Headers = Mapping[bytes, bytes]
Receive = Callable[[], Any]


def signed(headers: Headers, verify: Callable[[bytes, bytes, bytes], bool]) -> bytes | None:
    """The public key with which this request is signed now; None if it is not."""
    try:
        key, signature = (b64decode(headers[h], validate=True) for h in (KEY, SIGNATURE))
        age = (datetime.now(UTC) - datetime.fromisoformat(headers[TIME].decode("ascii"))).total_seconds()
        return key if -AHEAD < age < BEHIND and verify(key, headers[TIME], signature) else None
    except (KeyError, ValueError, TypeError, UnicodeError, binascii.Error):
        return None


class Known:
    """The registered keys, read anew at most every second."""

    def __init__(self, read: Callable[[], Mapping[bytes, str]], every: float = 1.0):
        self._read, self._every = read, every
        self._keys: frozenset[bytes] = frozenset()
        self._at = float("-inf")

    def __contains__(self, key: object) -> bool:
        if time.monotonic() - self._at > self._every:
            with contextlib.suppress(Exception):  # what was known before counts
                self._keys = frozenset(self._read())
            self._at = time.monotonic()
        return key in self._keys


class Budget:
    """Requests and bodies on their way, and bytes of answers since the cloud last asked."""

    def __init__(self) -> None:
        self.requests: Counter[bytes] = Counter()
        self.bodies = 0
        self.allowed: int | None = None  # bytes of an answer, the most the cloud has allowed
        self.pushed: Counter[bytes] = Counter()

    def asked(self, allowed: int) -> None:
        """The cloud has sent messages, whose answers may be so large; a repeated transfer doubles that at most."""
        self.allowed = max(self.allowed or 0, 2 * allowed + LARGEST_REQUEST)
        self.pushed.clear()

    def refuse(self, key: bytes, length: int, pushes: bool) -> int | None:
        """The status with which a request of a registered key is refused, if it is."""
        if self.requests[key] >= REQUESTS or self.bodies + length > BODIES:
            return 503  # tried again later
        if pushes and self.allowed is not None and self.pushed[key] + length > self.allowed:
            return 413
        return None

    def begin(self, key: bytes, length: int, pushes: bool) -> None:
        self.requests[key] += 1
        self.bodies += length
        if pushes:
            self.pushed[key] += length

    def end(self, key: bytes, length: int) -> None:
        self.bodies -= length
        self.requests[key] -= 1
        if self.requests[key] <= 0:
            del self.requests[key]


def in_time(receive: Receive, length: int) -> Receive:
    """The body of a request, as long as it arrives fast enough; then as if its sender had gone."""
    until = time.monotonic() + PATIENCE + length / SLOWEST
    whole = False

    async def next_part() -> Any:
        nonlocal whole
        if whole:  # what follows the body is the end of the connection, for which one may wait
            return await receive()
        try:
            part = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            return {"type": "http.disconnect"}
        whole = not part.get("more_body", False)
        return part

    return next_part


def bounded(protocol: Any) -> Any:
    """A protocol class of uvicorn with bounds on connections: all, from one address, and without a request."""
    open_: Counter[str] = Counter()

    class Bounded(protocol):  # type: ignore[misc]  # the class is found by uvicorn
        def connection_made(self, transport: Any) -> None:
            peer = transport.get_extra_info("peername")
            self._address = str(peer[0]) if peer else ""
            open_[self._address] += 1
            super().connection_made(transport)
            if open_[self._address] > PER_ADDRESS or open_.total() > CONNECTIONS:
                transport.abort()
                return
            self._first = asyncio.get_running_loop().call_later(FIRST_REQUEST, self._too_late, transport)

        def _too_late(self, transport: Any) -> None:
            if self.cycle is None:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            open_[self._address] -= 1
            if open_[self._address] <= 0:
                del open_[self._address]
            if hasattr(self, "_first"):
                self._first.cancel()
            super().connection_lost(exc)

    return Bounded
