"""A node's end of the transport: it holds one stream to its server and answers requests with one function.

The stream is held on the event loop, and answers are computed in the thread that calls `Node.run`. So a node that
computes still answers gRPC's keep-alive, and a broken connection is replaced meanwhile.
"""

import asyncio
import contextlib
import fcntl
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from coterie.errors import CoterieError, sentence
from coterie.federation.transport.base import (
    MAX_PAYLOAD,
    AnswerFunction,
    Buffer,
    NoPlanError,
    RefusedError,
    UnreachableError,
    aligned_buffer,
)
from coterie.federation.transport.channel import (
    GRPC_OPTIONS,
    HANDSHAKE_SECONDS,
    STREAM_ERRORS,
    ArrivingPayload,
    chunks,
    grpc,
    pb,
    read_message,
    rpc,
)
from coterie.federation.transport.credentials import NodeCredentials
from coterie.federation.transport.event_loop import event_loop, start_on_loop

_LEAVE_SECONDS = 2.0  # time for the last answer to be sent before the node disconnects
_MAX_REQUEST_SECONDS = 1e9  # a longer time for an answer is an error of the server
_REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED}
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
    """A request that has been received completely."""

    kind: str
    round: int
    ticket: str
    until: float  # deadline, by time.monotonic
    payloads: dict[str, memoryview]  # "own", and perhaps "shared"


@dataclass(frozen=True)
class OutgoingAnswer:
    """The answer to a request, or the error that is sent instead."""

    request: IncomingRequest
    content: Buffer = b""
    error: str | None = None
    no_plan: bool = False  # the error is that this node has no plan of the run

    @property
    def offer(self) -> pb.FromNode:
        """The message that tells the server of the answer."""
        answer = pb.Answer(ticket=self.request.ticket, kind=self.request.kind, round=self.request.round)
        if self.error is None:
            answer.size = memoryview(self.content).nbytes
        else:
            answer.error.CopyFrom(pb.Error(reason=sentence(self.error, 2000), no_plan=self.no_plan))
        return pb.FromNode(answer=answer)


@dataclass
class Node:
    """Answers requests until it is stopped; survives restarts of the server and of the network."""

    address: str  # HOST:PORT of the cloud, or of an edge
    ca: Path
    key: Path
    handle: AnswerFunction
    largest: int = MAX_PAYLOAD  # bytes of one download
    patience: float = 30.0  # seconds for which a refused certificate is tried again: it may be registered soon
    certificate: Path | None = None  # default: the file next to the key, with the suffix .crt
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
        """Answer requests until `stopping` is set; raise CoterieError if the server refuses the certificate."""
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise CoterieError(f'address "{self.address}" must be HOST:PORT')
        credentials = NodeCredentials(self.ca, self.key, self.certificate)
        credentials.load()
        if credentials.warning:
            log.warning("%s", credentials.warning)
        lock = _lock_key(self.key)
        connection = _Connection(self, credentials)
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
            payloads = request.payloads
            content = self.handle(request.kind, request.round, payloads.get("shared"), payloads["own"])
            return OutgoingAnswer(request, content)
        except Exception as e:
            expected = isinstance(e, CoterieError)
            reason = str(e) if expected else f"{type(e).__name__}: {e}"
            log.error("round %s not answered: %s", request.round, reason, exc_info=None if expected else e)
            return OutgoingAnswer(request, error=reason, no_plan=isinstance(e, NoPlanError))


class _ArrivingRequest:
    """A request whose payloads are being received."""

    def __init__(self, head: pb.Request, largest: int):
        sizes = {"shared": head.shared_bytes} if head.HasField("shared_bytes") else {}
        sizes["own"] = head.own_bytes
        total = sum(sizes.values())
        if total > largest or not 0 <= head.seconds <= _MAX_REQUEST_SECONDS:
            raise UnreachableError(f"the server sent a request with {total} bytes and {head.seconds:g} s, not allowed")
        buffers = {name: aligned_buffer(size) for name, size in sizes.items()}
        until = time.monotonic() + head.seconds
        self.request = IncomingRequest(head.kind, head.round, head.ticket, until, buffers)
        self._payloads = [ArrivingPayload(buffers[name], size) for name, size in sizes.items() if size]

    @property
    def complete(self) -> bool:
        return not self._payloads

    def add(self, chunk: bytes) -> None:
        if self._payloads[0].add(chunk):
            self._payloads.pop(0)


class _Connection:
    """Holds the stream to the server; everything except the attributes that `Node` uses is on the event loop."""

    def __init__(self, node: Node, credentials: NodeCredentials):
        self.address, self.largest, self.patience = node.address, node.largest, node.patience
        self.stopping, self.connected = node.stopping, node.connected
        self.inbox: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there is a request; False: the end
        self.next: IncomingRequest | None = None  # the newest request, until work on it begins; older ones are void
        self.answer: OutgoingAnswer | None = None  # to the newest request: no request is worked on twice
        self._credentials = credentials
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
            renewed = asyncio.create_task(self._credentials.changed())
            await asyncio.wait({stream, stop, renewed}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and not stream.done():
                await self._say_goodbye(stream)
                renewed.cancel()
                break
            if renewed.done() and not stream.done():
                log.info("the node's certificate has changed; connecting again")
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)
            renewed.cancel()
            self._call = None
            if self.connected.is_set():
                self.connected.clear()
                refused_since, was_connected, pause, last_warning = None, True, 0.2, ""
            try:
                if not stream.cancelled():
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
                    await self._call.write(pb.FromNode(leave=pb.Leave()))
                    await self._call.done_writing()
                    await asyncio.wait({stream}, timeout=1.0)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)

    async def _connect(self) -> None:
        """Hold one stream until it ends; raise CoterieError with the reason it ended."""
        own_connection = ("grpc.use_local_subchannel_pool", 1)  # not shared with other nodes of this process
        options = [*GRPC_OPTIONS, own_connection]
        async with grpc.aio.secure_channel(self.address, self._credentials.load(), options=options) as channel:
            call = rpc.FederationServiceStub(channel).Connect()
            try:
                async with asyncio.timeout(2 * HANDSHAKE_SECONDS):
                    await call.write(pb.FromNode(join=pb.Join(ticket=self._ticket, max_bytes=self.largest)))
                    message = await self._read(call)
                if message.WhichOneof("content") != "welcome":
                    raise CoterieError("the server does not speak Coterie's protocol")
                log.info("connected to %s as %s", self.address, sentence(message.welcome.name))
                await self._receive(call)
            except TimeoutError as e:
                raise UnreachableError(f"{self.address} does not answer") from e
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as e:
                code, reason = await call.code(), sentence(str(await call.details()))
                if code in _REFUSALS:
                    raise RefusedError(f"the server refused this node: {reason}") from e
                if code is grpc.StatusCode.UNAVAILABLE and not self.connected.is_set():
                    raise await self._credentials.explain(self.address) from e
                raise UnreachableError(f"the connection to {self.address} is lost: {reason}") from e

    async def _read(self, call: Any) -> Any:
        try:
            message = await read_message(call)
        except CoterieError as e:
            raise UnreachableError(f"the server: {e}") from e
        if message is None:
            raise UnreachableError(f"{self.address} closed the connection")
        return message

    async def _receive(self, call: Any) -> None:
        """Receive requests, and send answers that the server permits, until the stream ends."""
        arriving: _ArrivingRequest | None = None
        uploads = set[asyncio.Task[None]]()
        self._call = call
        self.connected.set()
        await self.offer()
        try:
            while True:
                message = await self._read(call)
                content = message.WhichOneof("content")
                if content == "request" and arriving is None:
                    arriving = _ArrivingRequest(message.request, self.largest)
                elif content == "chunk" and arriving is not None:
                    arriving.add(message.chunk)
                elif content == "permit":
                    upload = asyncio.create_task(self._upload(call, message.permit.ticket))
                    uploads.add(upload)
                    upload.add_done_callback(uploads.discard)
                elif content == "reject":
                    self._drop_answer(message.reject)
                else:
                    raise UnreachableError("the server sent a message at the wrong time")
                if arriving is not None and arriving.complete:
                    request, arriving = arriving.request, None
                    await self._take(request)
                    del request
        finally:
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
                for chunk in chunks(answer.content):
                    await call.write(pb.FromNode(chunk=chunk))

    def _drop_answer(self, reject: pb.Reject) -> None:
        """Forget an answer that the server does not want."""
        if self.answer is not None and self.answer.request.ticket == reject.ticket:
            if self.answer.error is None:
                log.warning("the server refused the answer: %s", sentence(reject.reason))
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
