"""A node's end of the gRPC transport: it holds one stream to its server and answers with one function.

The stream is kept by the event loop of grpc_wire.py, the answers are made in the thread that calls `run`; so a node at
work still hears its server, and a broken connection is mended meanwhile. Frames and proofs: grpc_wire.py.
"""

import asyncio
import contextlib
import hashlib
import logging
import queue
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, sentence
from coterie.federation.identity.authority import load_key
from coterie.federation.transport import grpc_wire as w
from coterie.federation.transport.base import (
    Answering,
    Bell,
    Buffer,
    RefusedError,
    UnreachableError,
    lock_key,
    room,
)
from coterie.federation.transport.grpc_wire import grpc

REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}  # fmt: skip
log = logging.getLogger("coterie.device")


@dataclass(frozen=True)
class Question:
    """A message that is here as a whole; without parts if it was too large to be taken."""

    kind: str
    round: int
    ticket: str
    until: float
    parts: dict[str, memoryview]
    refused: str = ""


@dataclass(frozen=True)
class Reply:
    to: Question
    content: Buffer = b""
    error: str | None = None

    @property
    def offer(self) -> bytes:
        about = {"kind": self.to.kind, "round": self.to.round, "ticket": self.to.ticket}
        if self.error is None:
            return w.frame(b"A", **about, size=memoryview(self.content).nbytes)
        return w.frame(b"A", **about, error=self.error[:2000])


@dataclass
class _Arriving:
    """A question whose payloads are on their way."""

    fields: dict[str, Any]
    waiting: list[w.Filling]
    question: Question


@dataclass
class GrpcNode:
    """Answers messages until stopped; survives restarts of the server and of the network."""

    address: str  # HOST:PORT
    ca: Path
    key: Path
    handle: Answering
    largest: int
    patience: float  # seconds a refused key is tried: perhaps it is registered soon
    stopping: Bell
    connected: Any  # threading.Event
    _inbox: "queue.SimpleQueue[bool]" = field(default_factory=queue.SimpleQueue)  # a question is there; False: the end
    _next: Question | None = None  # the newest that nobody works on yet; older ones are void
    _ticket: str = ""  # of the newest question that is here
    _last: Reply | None = None  # to the newest that was worked on: no question is worked on twice
    _call: Any = None  # the stream, while it is held
    _offered: tuple[int, str] = (0, "")  # on which stream which answer was offered

    def run(self) -> None:
        """Blocks until `stopping` is set; raises CoterieError if the server refuses the key."""
        self._private = load_key(self.key)  # once: the file may be moved while we run
        memory = lock_key(self.key)
        try:
            held = w.start(self._hold())
            held.add_done_callback(lambda _: self._inbox.put(False))
            while self._inbox.get():
                question, self._next = self._next, None
                if question is not None:
                    self._answer(question)
            held.result()
        finally:
            if memory is not None:
                memory.close()

    def _answer(self, question: Question) -> None:
        self._last = None  # makes room before the next reply is made
        if time.monotonic() > question.until:
            log.warning("round %s not answered: its deadline passed before its turn", question.round)
            return
        try:
            if question.refused:
                raise CoterieError(question.refused)
            made = self.handle(question.kind, question.round, question.parts.get("shared"), question.parts["own"])
            reply = Reply(question, made)
        except Exception as e:
            reason = str(e) if isinstance(e, CoterieError) else f"{type(e).__name__}: {e}"
            trace = None if isinstance(e, CoterieError) else e
            log.error("round %s not answered: %s", question.round, reason, exc_info=trace)
            reply = Reply(question, error=reason)
        question.parts.clear()
        self._last = reply
        if not self.stopping.is_set():
            w.start(self._offer())

    # ---- on the event loop -------------------------------------------------------------------------------------------
    async def _hold(self) -> None:
        """Connect, again and again, until stopped."""
        self._stop, self._writing = asyncio.Event(), asyncio.Lock()
        self.stopping.listen(lambda: w.loop().call_soon_threadsafe(self._stop.set))
        stop = asyncio.create_task(self._stop.wait())
        refused_since: float | None = None
        once, pause, said = False, 0.2, ""
        while not self.stopping.is_set():
            held = asyncio.create_task(self._connection())
            await asyncio.wait({held, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not held.done():
                await self._goodbye(held)
                break
            lasted, self._call = self.connected.is_set(), None
            self.connected.clear()
            if lasted:
                refused_since, once, pause, said = None, True, 0.2, ""
            try:
                held.result()
            except RefusedError as e:
                now = time.monotonic()
                if refused_since is None:
                    refused_since = now
                    log.warning("%s", e)
                if not once and now - refused_since >= self.patience:
                    raise
            except CoterieError as e:
                if not once and not isinstance(e, UnreachableError):
                    raise
                if str(e) != said and not self.stopping.expected:
                    log.warning("%s; trying again", e)
                said = str(e)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()
            pause = min(3.0, 1.5 * pause)
        stop.cancel()

    async def _goodbye(self, held: "asyncio.Task[None]") -> None:
        """Say so on the stream, that the server does not wait for us; then go."""
        with contextlib.suppress(*w.LOST, TimeoutError):
            async with asyncio.timeout(1.0), self._writing:
                if self._call is not None:
                    await self._call.write(w.frame(b"B"))
                    await self._call.done_writing()
                    await asyncio.wait({held}, timeout=1.0)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)

    async def _connection(self) -> None:
        """One stream, from its proof to its end; how it ended is an error."""
        certificate, known = await w.certificate_of(self.address, self.ca)
        if not known:
            raise CoterieError(f"{self.address} does not speak gRPC")
        trusted = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(certificate).encode())
        alone = ("grpc.use_local_subchannel_pool", 1)  # two nodes of one process do not share a connection
        async with grpc.aio.secure_channel(self.address, trusted, options=[*w.OPTIONS, alone]) as channel:
            call = channel.stream_stream(f"/{w.SERVICE}/{w.METHOD}")()
            try:
                async with asyncio.timeout(2 * w.HANDSHAKE):
                    await self._prove(call, certificate)
                await self._listen(call)
            except TimeoutError as e:
                raise UnreachableError(f"{self.address} does not answer") from e
            except grpc.aio.AioRpcError as e:
                if e.code() in REFUSED:
                    raise RefusedError(f"the server refused this node: {sentence(str(e.details()))}") from e
                raise UnreachableError(f"the connection to {self.address} is lost: {sentence(str(e.details()))}") from e

    async def _prove(self, call: Any, certificate: bytes) -> None:
        asked = await self._read(call)
        if asked[:1] != b"C":
            raise CoterieError("the server does not speak Coterie's protocol")
        fields = w.fields_of(asked)
        if w.number(fields, "version") != w.VERSION:
            raise RefusedError(f"the server speaks version {fields['version']} of the transport, this node {w.VERSION}")
        digest = hashlib.sha256(certificate).digest()
        try:
            nonce, session = (bytes.fromhex(w.text(fields, name)) for name in ("nonce", "session"))
        except ValueError as e:
            raise CoterieError("the server's challenge is damaged") from e
        if len(nonce) != 32 or len(session) != 16:
            raise CoterieError("the server's challenge is damaged")
        pem, signature = w.sign(self._private, nonce, session, digest)
        proof = {"key": pem.decode(), "certificate": digest.hex(), "signature": signature.hex(), "ticket": self._ticket}
        await call.write(w.frame(b"P", **proof))
        welcome = await self._read(call)
        if welcome[:1] != b"W":
            raise CoterieError("the server does not speak Coterie's protocol")
        log.info("connected to %s as %s", self.address, sentence(w.text(w.fields_of(welcome), "name")))

    async def _read(self, call: Any) -> bytes:
        found = await w.hear(call)
        if not found:
            raise UnreachableError(f"{self.address} closed the connection")
        return found

    async def _listen(self, call: Any) -> None:
        arriving: _Arriving | None = None
        uploads = set[asyncio.Task[None]]()
        self._call = call
        self.connected.set()
        beat = asyncio.create_task(w.beat(call, self._writing))
        await self._offer()
        try:
            while True:
                content = await self._read(call)
                letter = content[:1]
                if letter == b"Q" and arriving is None:
                    arriving = self._announced(w.fields_of(content))
                elif letter == b"D" and arriving is not None:
                    if arriving.waiting[0].take(content):
                        arriving.waiting.pop(0)
                elif letter == b"G":
                    upload = asyncio.create_task(self._upload(call, w.text(w.fields_of(content), "ticket")))
                    uploads.add(upload)
                    upload.add_done_callback(uploads.discard)
                elif letter == b"N":
                    self._unwanted(w.fields_of(content))
                else:
                    raise UnreachableError("the server sent something that is not of Coterie's protocol")
                if arriving is not None and not arriving.waiting:
                    question, arriving = arriving.question, None
                    await self._take(question)
                    del question
        finally:
            beat.cancel()
            for upload in uploads:
                upload.cancel()

    def _announced(self, fields: dict[str, Any]) -> _Arriving:
        """Room for a question's payloads, unless they are too large."""
        sizes = {"shared": w.number(fields, "shared")} if fields.get("shared") is not None else {}
        sizes["own"] = w.number(fields, "own")
        whole = sum(sizes.values())
        fits = whole <= self.largest
        parts = {name: room(size) for name, size in sizes.items()} if fits else {}
        question = Question(
            w.text(fields, "kind"), w.number(fields, "round"), w.text(fields, "ticket"),
            time.monotonic() + w.number(fields, "seconds"), parts,
            "" if fits else f"the payload of {whole} bytes is larger than the {self.largest} allowed",
        )  # fmt: skip
        return _Arriving(fields, [w.Filling(parts.get(n), size) for n, size in sizes.items() if size], question)

    async def _take(self, question: Question) -> None:
        if question.ticket != self._ticket:
            self._ticket, self._next = question.ticket, question
            self._inbox.put(True)
        elif self._last is not None:
            await self._offer()

    async def _offer(self) -> None:
        """Tell the server that there is an answer; on a broken connection it is told again later."""
        reply, call = self._last, self._call
        if reply is None or call is None or self._offered == (id(call), reply.to.ticket):
            return
        self._offered = id(call), reply.to.ticket
        with contextlib.suppress(*w.LOST):
            async with self._writing:
                await call.write(reply.offer)

    async def _upload(self, call: Any, ticket: str) -> None:
        reply = self._last
        if reply is None or reply.to.ticket != ticket or reply.error is not None:
            return
        with contextlib.suppress(*w.LOST):
            async with self._writing:
                for piece in w.frames(reply.content):
                    await call.write(piece)

    def _unwanted(self, fields: dict[str, Any]) -> None:
        if self._last is not None and self._last.to.ticket == fields.get("ticket"):
            if self._last.error is None:
                log.warning("reply not taken: %s", sentence(str(fields.get("reason"))))
            self._last = None
