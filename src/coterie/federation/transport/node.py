"""A node's end of the transport: it holds one stream to its server and answers requests with one function.

The stream is held on the event loop, and answers are computed in the thread that calls `Node.run`. So a node that
computes still sends heartbeats, and a broken connection is replaced meanwhile.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import queue
import signal
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from coterie.errors import CoterieError, sentence
from coterie.federation.identity.authority import load_key
from coterie.federation.transport.base import (
    MAX_PAYLOAD,
    AnswerFunction,
    Buffer,
    NoPlanError,
    RefusedError,
    UnreachableError,
    aligned_buffer,
)
from coterie.federation.transport.event_loop import event_loop, start_on_loop
from coterie.federation.transport.frames import (
    GRPC_OPTIONS,
    HANDSHAKE_SECONDS,
    RPC_METHOD,
    RPC_SERVICE,
    STREAM_ERRORS,
    TRANSPORT_VERSION,
    ArrivingPayload,
    frame_fields,
    grpc,
    int_field,
    make_frame,
    payload_frames,
    read_frame,
    send_heartbeats,
    text_field,
)
from coterie.federation.transport.proof import NONCE_BYTES, SESSION_BYTES, server_certificate, sign_challenge

_LEAVE_SECONDS = 2.0  # time for the last answer to be sent before the node disconnects
_REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
_FOREIGN = "the server does not speak Coterie's protocol"
log = logging.getLogger("coterie.device")


class StopEvent(threading.Event):
    """A threading.Event that runs registered callbacks when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = False  # it will be set in a moment
        self._callbacks: list[Callable[[], object]] = []

    def set_after(self, seconds: float) -> None:
        """Set the event later, in another thread."""
        self.expected = True
        timer = threading.Timer(seconds, self.set)
        timer.daemon = True
        timer.start()

    def add_callback(self, call: Callable[[], object]) -> None:
        """Run `call` when the event is set, or now if it is set already."""
        self._callbacks.append(call)
        if self.is_set():
            call()

    def set(self) -> None:
        """Set the event and run the callbacks."""
        super().set()
        for call in self._callbacks:
            call()


@dataclass(frozen=True)
class IncomingRequest:
    """A request that has been received completely, or refused because it is too large."""

    kind: str
    round: int
    ticket: str
    until: float  # deadline, by time.monotonic
    payloads: dict[str, memoryview]  # "own", and perhaps "shared"; empty if the request is refused
    refused: str = ""  # the reason


@dataclass(frozen=True)
class OutgoingAnswer:
    """The answer to a request, or the error that is sent instead."""

    request: IncomingRequest
    content: Buffer = b""
    error: str | None = None
    no_plan: bool = False  # the error is that this node has no plan of the run

    @property
    def offer(self) -> bytes:
        """The frame that tells the server of the answer."""
        about = {"kind": self.request.kind, "round": self.request.round, "ticket": self.request.ticket}
        if self.error is None:
            return make_frame(b"A", **about, size=memoryview(self.content).nbytes)
        return make_frame(b"A", **about, error=self.error[:2000], **({"no_plan": True} if self.no_plan else {}))


@dataclass
class Node:
    """Answers requests until it is stopped; survives restarts of the server and of the network."""

    address: str  # HOST:PORT of the cloud, or of an edge
    ca: Path
    key: Path
    handle: AnswerFunction
    largest: int = MAX_PAYLOAD  # bytes of one download
    patience: float = 30.0  # seconds for which a refused key is tried again: it may be registered soon
    stopping: StopEvent = field(default_factory=StopEvent)
    connected: threading.Event = field(default_factory=threading.Event)

    def stop_on_signals(self) -> "Node":
        """Let SIGTERM and Ctrl-C end `run`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())
        return self

    def leave(self) -> None:
        """End `run` in a moment, when the last answer has been sent."""
        self.stopping.set_after(_LEAVE_SECONDS)

    def run(self) -> None:
        """Answer requests until `stopping` is set; raise CoterieError if the server refuses the key."""
        key = load_key(self.key)  # read once: the file may be moved while the node runs
        lock = _lock_key(self.key)
        connection = _Connection(self, key)
        try:
            held = start_on_loop(connection.hold())
            held.add_done_callback(lambda _: connection.inbox.put(False))
            while connection.inbox.get():
                request, connection.next = connection.next, None
                if request is not None:
                    self._work(connection, request)
            held.result()
        finally:
            if lock is not None:
                lock.close()

    def _work(self, connection: "_Connection", request: IncomingRequest) -> None:
        connection.answer = None  # frees its memory before the next answer is computed
        if time.monotonic() > request.until:
            log.warning("round %s not answered: its deadline passed before its turn", request.round)
            return
        connection.answer = self._answer(request)
        request.payloads.clear()
        if not self.stopping.is_set():
            start_on_loop(connection.offer())

    def _answer(self, request: IncomingRequest) -> OutgoingAnswer:
        try:
            if request.refused:
                raise CoterieError(request.refused)
            payloads = request.payloads
            content = self.handle(request.kind, request.round, payloads.get("shared"), payloads["own"])
            return OutgoingAnswer(request, content)
        except Exception as e:
            expected = isinstance(e, CoterieError)
            reason = str(e) if expected else f"{type(e).__name__}: {e}"
            log.error("round %s not answered: %s", request.round, reason, exc_info=None if expected else e)
            return OutgoingAnswer(request, error=reason, no_plan=isinstance(e, NoPlanError))


class _ArrivingRequest:
    """A request whose payloads are being received; payloads that are too large are discarded."""

    def __init__(self, fields: dict[str, Any], largest: int):
        sizes = {"shared": int_field(fields, "shared")} if fields.get("shared") is not None else {}
        sizes["own"] = int_field(fields, "own")
        total = sum(sizes.values())
        fits = total <= largest
        buffers = {name: aligned_buffer(size) for name, size in sizes.items()} if fits else {}
        self.request = IncomingRequest(
            text_field(fields, "kind"),
            int_field(fields, "round"),
            text_field(fields, "ticket"),
            time.monotonic() + int_field(fields, "seconds"),
            buffers,
            "" if fits else f"the payload of {total} bytes is larger than the {largest} allowed",
        )
        self._payloads = [ArrivingPayload(buffers.get(name), size) for name, size in sizes.items() if size]

    @property
    def complete(self) -> bool:
        return not self._payloads

    def add(self, frame: bytes) -> None:
        if self._payloads[0].add(frame):
            self._payloads.pop(0)


class _Connection:
    """Holds the stream to the server; everything except the attributes that `Node` uses is on the event loop."""

    def __init__(self, node: Node, key: Any):
        self.address, self.ca, self.largest, self.patience = node.address, node.ca, node.largest, node.patience
        self.stopping, self.connected = node.stopping, node.connected
        self.inbox: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there is a request; False: the end
        self.next: IncomingRequest | None = None  # the newest request, until work on it begins; older ones are void
        self.answer: OutgoingAnswer | None = None  # to the newest request: no request is worked on twice
        self._key = key
        self._ticket = ""  # ticket of the newest request
        self._call: Any = None  # the stream, while it is held
        self._offered: tuple[int, str] = (0, "")  # the stream and the ticket of the last offer

    async def hold(self) -> None:
        """Connect, and reconnect whenever the stream ends, until the node is stopped."""
        self._stop, self._writing = asyncio.Event(), asyncio.Lock()
        self.stopping.add_callback(lambda: event_loop().call_soon_threadsafe(self._stop.set))
        stop = asyncio.create_task(self._stop.wait())
        refused_since: float | None = None
        was_connected, pause, last_warning = False, 0.2, ""
        while not self.stopping.is_set():
            stream = asyncio.create_task(self._connect())
            await asyncio.wait({stream, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not stream.done():
                await self._say_goodbye(stream)
                break
            self._call = None
            if self.connected.is_set():
                self.connected.clear()
                refused_since, was_connected, pause, last_warning = None, True, 0.2, ""
            try:
                stream.result()
            except RefusedError as e:
                now = time.monotonic()
                if refused_since is None:
                    refused_since = now
                    log.warning("%s", e)
                if not was_connected and now - refused_since >= self.patience:
                    raise
            except CoterieError as e:
                if not was_connected and not isinstance(e, UnreachableError):
                    raise
                if str(e) != last_warning and not self.stopping.expected:
                    log.warning("%s; trying again", e)
                last_warning = str(e)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()
            pause = min(3.0, 1.5 * pause)
        stop.cancel()

    async def _say_goodbye(self, stream: "asyncio.Task[None]") -> None:
        """Tell the server that the node leaves, so that it does not wait for a reconnection; then disconnect."""
        with contextlib.suppress(*STREAM_ERRORS, TimeoutError):
            async with asyncio.timeout(1.0), self._writing:
                if self._call is not None:
                    await self._call.write(make_frame(b"B"))
                    await self._call.done_writing()
                    await asyncio.wait({stream}, timeout=1.0)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)

    async def _connect(self) -> None:
        """Hold one stream, from the proof of the key to its end; raise CoterieError with the reason it ended."""
        certificate = await server_certificate(self.address, self.ca)
        trusted = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(certificate).encode())
        own_connection = ("grpc.use_local_subchannel_pool", 1)  # not shared with other nodes of this process
        async with grpc.aio.secure_channel(self.address, trusted, options=[*GRPC_OPTIONS, own_connection]) as channel:
            call = channel.stream_stream(f"/{RPC_SERVICE}/{RPC_METHOD}")()
            try:
                async with asyncio.timeout(2 * HANDSHAKE_SECONDS):
                    await self._prove_key(call, certificate)
                await self._receive(call)
            except TimeoutError as e:
                raise UnreachableError(f"{self.address} does not answer") from e
            except grpc.aio.AioRpcError as e:
                reason = sentence(str(e.details()))
                if e.code() in _REFUSALS:
                    raise RefusedError(f"the server refused this node: {reason}") from e
                raise UnreachableError(f"the connection to {self.address} is lost: {reason}") from e

    async def _prove_key(self, call: Any, certificate: bytes) -> None:
        challenge = await self._read(call)
        if challenge[:1] != b"C":
            raise CoterieError(_FOREIGN)
        fields = frame_fields(challenge)
        if (version := int_field(fields, "version")) != TRANSPORT_VERSION:
            raise RefusedError(f"the server speaks version {version} of the transport, this node {TRANSPORT_VERSION}")
        try:
            nonce, session = (bytes.fromhex(text_field(fields, name)) for name in ("nonce", "session"))
        except ValueError as e:
            raise CoterieError("the server's challenge is damaged") from e
        if len(nonce) != NONCE_BYTES or len(session) != SESSION_BYTES:
            raise CoterieError("the server's challenge is damaged")
        digest = hashlib.sha256(certificate).digest()
        pem, signature = sign_challenge(self._key, nonce, session, digest)
        proof = {"key": pem.decode(), "certificate": digest.hex(), "signature": signature.hex(), "ticket": self._ticket}
        await call.write(make_frame(b"P", **proof))
        welcome = await self._read(call)
        if welcome[:1] != b"W":
            raise CoterieError(_FOREIGN)
        log.info("connected to %s as %s", self.address, sentence(text_field(frame_fields(welcome), "name")))

    async def _read(self, call: Any) -> bytes:
        frame = await read_frame(call)
        if not frame:
            raise UnreachableError(f"{self.address} closed the connection")
        return frame

    async def _receive(self, call: Any) -> None:
        """Receive requests, and send answers that the server requests, until the stream ends."""
        arriving: _ArrivingRequest | None = None
        uploads = set[asyncio.Task[None]]()
        self._call = call
        self.connected.set()
        heartbeats = asyncio.create_task(send_heartbeats(call, self._writing))
        await self.offer()
        try:
            while True:
                frame = await self._read(call)
                letter = frame[:1]
                if letter == b"Q" and arriving is None:
                    arriving = _ArrivingRequest(frame_fields(frame), self.largest)
                elif letter == b"D" and arriving is not None:
                    arriving.add(frame)
                elif letter == b"G":
                    upload = asyncio.create_task(self._upload(call, text_field(frame_fields(frame), "ticket")))
                    uploads.add(upload)
                    upload.add_done_callback(uploads.discard)
                elif letter == b"N":
                    self._drop_answer(frame_fields(frame))
                else:
                    raise UnreachableError("the server sent a frame that is not part of Coterie's protocol")
                if arriving is not None and arriving.complete:
                    request, arriving = arriving.request, None
                    await self._take(request)
                    del request
        finally:
            heartbeats.cancel()
            for upload in uploads:
                upload.cancel()

    async def _take(self, request: IncomingRequest) -> None:
        """Pass a new request on to the node; offer the answer again if the request is known."""
        if request.ticket != self._ticket:
            self._ticket, self.next = request.ticket, request
            self.inbox.put(True)
        elif self.answer is not None:
            await self.offer()

    async def offer(self) -> None:
        """Tell the server that there is an answer, once per connection."""
        answer, call = self.answer, self._call
        if answer is None or call is None or self._offered == (id(call), answer.request.ticket):
            return
        self._offered = id(call), answer.request.ticket
        with contextlib.suppress(*STREAM_ERRORS):
            async with self._writing:
                await call.write(answer.offer)

    async def _upload(self, call: Any, ticket: str) -> None:
        answer = self.answer
        if answer is None or answer.request.ticket != ticket or answer.error is not None:
            return
        with contextlib.suppress(*STREAM_ERRORS):
            async with self._writing:
                for frame in payload_frames(answer.content):
                    await call.write(frame)

    def _drop_answer(self, fields: dict[str, Any]) -> None:
        """Forget an answer that the server does not want."""
        if self.answer is not None and self.answer.request.ticket == fields.get("ticket"):
            if self.answer.error is None:
                log.warning("the server refused the answer: %s", sentence(str(fields.get("reason"))))
            self.answer = None


def _lock_key(key: Path) -> TextIO | None:
    """Lock a file next to the key, so that one process per host uses it; None if that file cannot be made."""
    try:
        lock = key.with_suffix(".node").open("a+")
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        lock.close()
        raise CoterieError(f"a different process is already connected with the key {key}") from e
    return lock
