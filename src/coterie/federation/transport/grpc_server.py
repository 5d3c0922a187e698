"""The server's end of the gRPC transport, for a cloud as for an edge: it listens in this process.

    with GrpcLink(certs, "0.0.0.0", 9092) as link:
        link.nodes()                                              # names of who is connected
        answers, errors, traffic = link.send({"alice": data}, "train", round=3, deadline=600)

Nothing is kept on disk and nothing is polled: a question goes out on the stream that its node holds, at once, and the
answer comes back on it. What holds here as in FlowerLink:

- A question has a ticket. A node whose connection broke is sent it again when it is back, unless it says that it has
  it; the answer with this ticket counts once, over whichever connection it comes.
- A node that vanished has RETURN seconds to come back, one that said goodbye LEAVE seconds.
- A node is taken for gone when its connection ends, or when nothing was heard of it for grpc_wire.SILENCE seconds.
- The list of keys is the directory nodes/ of the certificates as it was at the last look, and there is one every
  second while a question waits.

Who has not proved his key yet gets HANDSHAKE seconds and one frame of CHUNK bytes, and there are at most STRANGERS of
those at a time: one more takes the place of the oldest. gRPC's own handshake, idle connections and their number are
limited as well.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import resource
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from coterie.errors import CoterieError, sentence
from coterie.federation.identity.authority import Certs
from coterie.federation.transport import grpc_wire as w
from coterie.federation.transport.base import (
    MAX_PAYLOAD,
    Buffer,
    Cause,
    Failure,
    LinkBytes,
    NodeReplies,
    UnreachableError,
    UntrustedError,
    address,
    by_name,
    room,
    wait_for_port,
)
from coterie.federation.transport.grpc_wire import grpc

LOOK = 1.0  # seconds between looks at who is connected while waiting for answers
RETURN = 25.0  # seconds a node has to come back whose connection broke while it was asked,
LEAVE = 5.0  # and one that said goodbye
GRACE = 15.0  # seconds nodes have to come back after this process itself was stopped for a while
FOLLOW = 10.0  # seconds the port of a program that was just killed may take to be free
STRANGERS = 64  # connections that have not said who they are
CONNECTIONS = 4096  # in all; fewer if this process may not have as many open files
log = logging.getLogger("coterie.cloud")


@dataclass
class _Question:
    """What one node is asked, until it has answered."""

    node: str
    kind: str
    round: int
    ticket: str
    until: float
    largest: int
    own: Buffer
    shared: Buffer | None
    down: int = 0  # bytes of frames that went to the node for it,
    up: int = 0  # and came back

    @property
    def payload(self) -> int:
        return memoryview(self.own).nbytes + (0 if self.shared is None else memoryview(self.shared).nbytes)

    @property
    def head(self) -> bytes:
        seconds = max(1, round(self.until - time.monotonic()))
        shared = None if self.shared is None else memoryview(self.shared).nbytes
        return w.frame(
            b"Q", kind=self.kind, round=self.round, ticket=self.ticket, seconds=seconds, shared=shared,
            own=memoryview(self.own).nbytes,
        )  # fmt: skip


@dataclass
class _Round:
    """What one `send` knows: whom it still asks, what came back."""

    waiting: dict[str, _Question]
    seen: dict[str, float] = field(default_factory=dict)  # when somebody who was asked was last connected
    again: set[str] = field(default_factory=set)  # who came back and was asked again, which is told once
    answers: dict[str, memoryview] = field(default_factory=dict)
    errors: dict[str, Failure] = field(default_factory=dict)
    traffic: dict[str, LinkBytes] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)  # nobody is asked any more

    def answered(self, q: _Question, content: memoryview) -> None:
        del self.waiting[q.node]
        self.answers[q.node] = content
        self.traffic[q.node] = LinkBytes(q.payload, len(content), q.down, q.up)
        self._look()

    def failed(self, node: str, cause: Cause, reason: str) -> None:
        self.waiting.pop(node, None)
        self.errors[node] = Failure(cause, reason)
        log.warning("%s", reason)
        self._look()

    def _look(self) -> None:
        if not self.waiting:
            self.over.set()


class _Held:
    """A stream that a node holds; everything here happens on the event loop."""

    def __init__(self, name: str, key: bytes, context: Any, ticket: str):
        self.name, self.key, self.context = name, key, context
        self.ticket = ticket  # of the question the node has
        self.task = asyncio.current_task()
        self.writing = asyncio.Lock()
        self.sending: asyncio.Task[None] | None = None
        self.ended = ""  # why we ended it

    def end(self, reason: str) -> None:
        self.ended = reason
        if self.task is not None:
            self.task.cancel()

    async def write(self, content: bytes, q: _Question | None = None) -> None:
        await self.context.write(content)
        if q is not None:
            q.down += len(content) + w.PREFIX

    async def ask(self, q: _Question) -> None:
        """Send a question, unless the node says that it has it."""
        async with self.writing:
            if self.ticket == q.ticket:
                return
            await self.write(q.head, q)
            for payload in (q.shared, q.own):
                for piece in w.frames(payload) if payload is not None else ():
                    await self.write(piece, q)
            self.ticket = q.ticket


class GrpcLink:
    """A server program's connections to its nodes."""

    def __init__(self, certs: Path | Certs, host: str, port: int):
        self.certs = certs if isinstance(certs, Certs) else Certs(certs)
        self.host, self.port = host, port
        self.looked: Callable[[Collection[str], Collection[str]], None] = lambda connected, asked: None
        self._session = secrets.token_bytes(16)
        self._server: Any = None
        self._shown = _Shown(self.certs)
        self._names: dict[bytes, str] = {}  # of the registered keys (PEM)
        self._held: dict[str, _Held] = {}
        self._left: dict[str, float] = {}  # when a node said goodbye
        self._strangers: dict[asyncio.Task[Any], None] = {}  # streams without a proof, the oldest first
        self._rounds: list[_Round] = []  # a node is asked in one of them at a time
        self._looked = time.monotonic()
        self._away = float("-inf")  # when this process was last seen to have been stopped

    def __enter__(self) -> "GrpcLink":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Listen; a certificate that no node would trust is found now."""
        self.certs.check()
        self.certs.switch()
        self._shown.current()
        for warning in self.certs.check_dates():
            log.warning("%s", warning)
        wait_for_port(self.host, self.port, FOLLOW)
        self._register()
        w.run(self._listen())
        try:
            w.run(self._trusted())
        except BaseException:
            self.close()
            raise
        log.info("listening on %s", address(self.host, self.port))

    def close(self) -> None:
        """Nodes see that their streams end, and try to come back."""
        if self._server is not None:
            server, self._server = self._server, None
            w.run(server.stop(0.5))

    async def _listen(self) -> None:
        most = _open_files() - 200
        options = [
            *w.OPTIONS,
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", 2),
            ("grpc.max_connection_idle_ms", int(2000 * w.HANDSHAKE)),
            ("grpc.server_handshake_timeout_ms", int(1000 * w.HANDSHAKE)),
            ("grpc.max_allowed_incoming_connections", max(100, min(CONNECTIONS, most))),
        ]
        self._server = grpc.aio.server(options=options)
        held = grpc.stream_stream_rpc_method_handler(self._stream)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(w.SERVICE, {w.METHOD: held}),))
        where = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        pair = grpc.dynamic_ssl_server_credentials(self._shown.current(), self._shown.renewed)
        try:
            self._server.add_secure_port(where, pair)
        except RuntimeError as e:
            raise CoterieError(f"port {self.port} on {self.host} cannot be used: {e}") from e
        await self._server.start()

    async def _trusted(self) -> None:
        try:
            await w.certificate_of(address(self.host, self.port), self.certs.ca)
        except UntrustedError as e:
            raise CoterieError(f"the certificate {self.certs.server} does not hold ({e}); renew it") from e
        except UnreachableError as e:
            raise CoterieError(f"the server that was just started does not answer: {e}") from e

    # ---- who is there ------------------------------------------------------------------------------------------------
    def nodes(self) -> list[str]:
        """Names of who is connected now. Keys that are no longer in the directory are cut off."""
        self._register()
        return sorted(w.run(self._look()))

    def _register(self) -> None:
        with contextlib.suppress(OSError):  # without write access `coterie certs switch` does it
            if self.certs.switch():
                log.info("the new authority has taken over; devices need the ca.crt that was made with it")
        names = self.certs.accepted()
        w.loop().call_soon_threadsafe(self._registered, names)

    def _registered(self, names: dict[bytes, str]) -> None:
        self._names = names
        for held in list(self._held.values()):
            if names.get(held.key) != held.name:
                held.end("this key is not registered any more")

    async def _look(self) -> set[str]:
        return {name for name, held in self._held.items() if not held.ended}

    async def _stream(self, requests: Any, context: Any) -> None:
        """One connection. gRPC logs what is raised here with its traceback, except for a stream that was cancelled."""
        try:
            await self._serve(context)
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None  # the other side had gone while something was written

    async def _serve(self, context: Any) -> None:
        """One connection, of whoever it is."""
        try:
            held = await self._introduced(context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the node did not say in time who it is")
        except CoterieError as e:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(e))
        with contextlib.suppress(OSError):  # without write access the old key ends with the overlap
            if self.certs.seen(held.name, held.key):
                log.info("%s has changed its key; the old one is refused from now on", held.name)
        earlier = self._held.get(held.name)
        self._held[held.name] = held
        if earlier is not None:
            earlier.end("another connection with the same key took its place")
        beat = asyncio.create_task(w.beat(context, held.writing))
        try:
            async with held.writing:
                await held.write(w.frame(b"W", name=held.name))
            self._ask(held.name)
            if await self._hear(held):
                self._left[held.name] = time.monotonic()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was heard of it for {w.SILENCE:g} s")
        except CoterieError as e:
            if (now := self._asking(held.name)) is not None:
                now.failed(held.name, Cause.WRONG, f"{held.name}: {e}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        except asyncio.CancelledError:
            if not held.ended:
                raise
            gone = grpc.StatusCode.UNAUTHENTICATED if "registered" in held.ended else grpc.StatusCode.ABORTED
            await context.abort(gone, held.ended)
        finally:
            beat.cancel()
            if held.sending is not None:
                held.sending.cancel()
            if self._held.get(held.name) is held:
                del self._held[held.name]

    async def _introduced(self, context: Any) -> _Held:
        """As `_proved`, in limited time. Who is in a hurry takes the place of who has kept one longest."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._strangers) >= STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[task] = None
        try:
            async with asyncio.timeout(w.HANDSHAKE):
                return await self._proved(context)
        except asyncio.CancelledError:
            if task in self._strangers:
                raise  # the stream has ended
            task.uncancel()
            raise TimeoutError from None
        finally:
            self._strangers.pop(task, None)

    async def _proved(self, context: Any) -> _Held:
        """The node at the other end, if it is one."""
        if list(context.auth_context().get("ssl_tls_version", ())) != [b"TLSv1.3"]:
            raise CoterieError("TLS 1.3 is needed")
        nonce = w.nonce()
        challenge = {"version": w.VERSION, "session": self._session.hex(), "nonce": nonce.hex()}
        await context.write(w.frame(b"C", **challenge))
        content = await context.read()
        if content is grpc.aio.EOF or content[:1] != b"P":
            raise CoterieError("the node did not say who it is")
        fields = w.fields_of(content)
        key = w.text(fields, "key").encode()
        try:
            certificate, signature = (bytes.fromhex(w.text(fields, n)) for n in ("certificate", "signature"))
        except ValueError as e:
            raise CoterieError("the proof is damaged") from e
        if not self._shown.ours(certificate):
            raise CoterieError("the proof is for another server")
        name = self._names.get(key)
        if name is None:
            raise CoterieError("this key is not registered")
        if not w.signed(key, signature, nonce, self._session, certificate):
            raise CoterieError("the signature is not that of the key")
        return _Held(name, key, context, w.text(fields, "ticket"))

    # ---- questions and answers, on the event loop --------------------------------------------------------------------
    def _ask(self, name: str) -> None:
        """Send what waits for the node, if it is there."""
        held, now = self._held.get(name), self._asking(name)
        if held is None or held.ended or now is None:
            return
        if name in now.seen and name not in now.again and held.ticket != now.waiting[name].ticket:
            log.info("%s came back, asking again", name)
            now.again.add(name)
        now.seen[name] = time.monotonic()
        held.sending = asyncio.create_task(self._sent(held, now.waiting[name]))

    async def _sent(self, held: _Held, q: _Question) -> None:
        with contextlib.suppress(*w.LOST):
            await held.ask(q)  # a broken stream also ends where it is read

    async def _hear(self, held: _Held) -> bool:
        """Until the stream ends; True if the node said goodbye."""
        arriving: w.Filling | None = None
        q: _Question | None = None
        while content := await w.hear(held.context):
            if content[:1] == b"B":
                return True
            if arriving is None:
                if content[:1] != b"A":
                    raise CoterieError("it sent something that is not of Coterie's protocol")
                fields = w.fields_of(content)
                q = self._asked(held.name, fields)
                if q is None:
                    refusal = "nobody waits for it any more"
                else:
                    q.up += len(content) + w.PREFIX
                    refusal = self._refused(q, fields)
                if refusal or q is None:
                    async with held.writing:
                        await held.write(w.frame(b"N", ticket=fields.get("ticket"), reason=refusal))
                    q = None
                    continue
                size = w.number(fields, "size")
                async with held.writing:
                    await held.write(w.frame(b"G", ticket=q.ticket), q)
                arriving = w.Filling(room(size), size)
                whole = size == 0
            else:
                if content[:1] != b"D":
                    raise CoterieError("it sent something that is not of Coterie's protocol")
                whole = arriving.take(content)
                if q is not None:
                    q.up += len(content) + w.PREFIX
                    if not self._waits(q):
                        arriving.buffer = q = None  # the rest is of no use
            if whole:
                if q is not None and arriving.buffer is not None and (now := self._waits(q)) is not None:
                    now.answered(q, arriving.buffer)
                arriving = q = None
        return False

    def _asked(self, name: str, fields: dict[str, Any]) -> _Question | None:
        """The question that this is an answer to."""
        now = self._asking(name)
        q = now.waiting[name] if now is not None else None
        ticket = w.text(fields, "ticket")
        return q if q is not None and hmac.compare_digest(ticket.encode(), q.ticket.encode()) else None

    def _asking(self, name: str) -> _Round | None:
        """The exchange in which a node is asked and has not answered."""
        return next((now for now in self._rounds if name in now.waiting), None)

    def _waits(self, q: _Question) -> _Round | None:
        """The exchange that waits for the answer to this question."""
        now = self._asking(q.node)
        return now if now is not None and now.waiting[q.node] is q else None

    def _refused(self, q: _Question, fields: dict[str, Any]) -> str:
        """Why an offered answer is not fetched: it is no answer, or not to this question, or too large."""
        reason, cause = "", Cause.WRONG
        try:
            if "error" in fields:
                cause = Cause.DECLINED
                reason = sentence(w.text(fields, "error"), 2000) or "no reason given"
            elif (w.text(fields, "kind"), w.number(fields, "round")) != (q.kind, q.round):
                reason = f"it is a reply of round {fields['round']}, asked was round {q.round}"
            elif (size := w.number(fields, "size")) > q.largest:
                reason = f"the payload of {size} bytes is larger than the {q.largest} allowed"
        except CoterieError as e:
            reason = str(e)
        if reason and (now := self._waits(q)) is not None:
            now.failed(q.node, cause, f"{q.node}: {reason}")
        return reason

    # ---- a round -----------------------------------------------------------------------------------------------------
    def send(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = MAX_PAYLOAD,
    ) -> NodeReplies:  # fmt: skip
        """Ask nodes; return who answered within `deadline` seconds, and for the others why they did not.

        `shared` goes to all. An answer over `largest` bytes is refused unread.
        """
        until = time.monotonic() + deadline
        now = _Round({
            node: _Question(node, kind, round, secrets.token_hex(16), until, largest, payloads[node], shared)
            for node in sorted(payloads)
        })  # fmt: skip
        if not now.waiting:
            return NodeReplies({}, {}, {})
        try:
            self._looked = time.monotonic()
            w.run(self._begin(now))
            while not now.over.is_set() and time.monotonic() < until:
                self._wait(now)
                now.over.wait(max(0.0, min(LOOK, until - time.monotonic())))
        finally:
            w.run(self._end(now, deadline))
        return NodeReplies(by_name(now.answers), by_name(now.errors), by_name(now.traffic))

    def begin(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = MAX_PAYLOAD,
    ) -> "GrpcExchange":  # fmt: skip
        """Ask nodes and wait for nobody: `poll` of what is returned fetches what has come."""
        until = time.monotonic() + deadline
        now = _Round({
            node: _Question(node, kind, round, secrets.token_hex(16), until, largest, payloads[node], shared)
            for node in sorted(payloads)
        })  # fmt: skip
        w.run(self._begin(now))
        return GrpcExchange(self, now, until, deadline)

    async def _taken(self, now: _Round, until: float, deadline: float) -> NodeReplies:
        """What has come of an exchange since the last time; whoever is gone or late is given up."""
        moment, connected = time.monotonic(), await self._look()
        for node in list(now.waiting):
            if node in connected:
                now.seen[node] = moment
            elif moment - now.seen.setdefault(node, moment) > RETURN:
                now.failed(node, Cause.ABSENT, f"{node} is not connected any more")
        if moment >= until or not now.waiting:
            await self._end(now, deadline)
        found = NodeReplies(by_name(now.answers), by_name(now.errors), by_name(now.traffic))
        now.answers, now.errors, now.traffic = {}, {}, {}
        return found

    async def _begin(self, now: _Round) -> None:
        self._rounds.append(now)
        for node in list(now.waiting):
            self._ask(node)

    def _wait(self, now: _Round) -> None:
        """A look at who is there while the round waits."""
        with contextlib.suppress(CoterieError):  # a key that cannot be read is complained of at the next round
            self._register()
        connected, asked = w.run(self._watch(now))
        self.looked(connected, asked)

    async def _watch(self, now: _Round) -> tuple[set[str], list[str]]:
        moment = time.monotonic()
        if moment - self._looked > 5 * LOOK:
            self._away = moment
        self._looked = moment
        connected = await self._look()
        for node in list(now.waiting):
            if node in connected:
                now.seen[node] = moment
            elif moment - self._away > GRACE:
                seen = now.seen.get(node, float("-inf"))
                gone = self._left.get(node, float("-inf")) >= seen
                if moment - seen > (LEAVE if gone else RETURN):
                    now.failed(node, Cause.ABSENT, f"{node} is not connected" + " any more" * (node in now.seen))
        return connected, list(now.waiting)

    async def _end(self, now: _Round, deadline: float) -> None:
        if now in self._rounds:
            self._rounds.remove(now)
        for node in list(now.waiting):
            now.failed(node, Cause.LATE, f"{node} did not answer within {deadline:g} s")
            held = self._held.get(node)
            if held is not None and held.sending is not None and not held.sending.done():
                held.end("it did not take its message in time")


@dataclass
class GrpcExchange:
    """Messages on their way, and their answers."""

    link: GrpcLink
    now: _Round
    until: float
    deadline: float

    @property
    def waiting(self) -> set[str]:
        """Who has neither answered nor been given up; or has, and it was not fetched yet."""
        return {*self.now.waiting, *self.now.answers, *self.now.errors}

    def poll(self) -> NodeReplies:
        """What is new since the last call; waits for nobody."""
        found: NodeReplies = w.run(self.link._taken(self.now, self.until, self.deadline))
        return found


class _Shown:
    """The certificate that the server shows. A renewed one counts from the next connection on, without a restart."""

    def __init__(self, certs: Certs):
        self.certs = certs
        self._files: tuple[int, ...] = ()
        self._digests = set[bytes]()
        self._made: Any = None
        self._lock = threading.Lock()

    def current(self) -> Any:
        self.renewed()
        if self._made is None:
            raise CoterieError(f"the certificate {self.certs.server} and its key do not go together; renew it")
        return self._made

    def renewed(self) -> Any:
        """GRPC asks at every handshake; None: nothing has changed."""
        with self._lock:
            try:
                files = tuple(p.stat().st_mtime_ns for p in (self.certs.server, self.certs.server_key))
                if files == self._files:
                    return None
                certificate, key = self.certs.server.read_bytes(), self.certs.server_key.read_bytes()
                if not _pair(certificate, key):
                    return None  # they are being replaced
                self._digests.add(_digest(certificate))
                self._made, self._files = grpc.ssl_server_certificate_configuration([(key, certificate)]), files
                return self._made
            except (OSError, ValueError):
                return None

    def ours(self, digest: bytes) -> bool:
        """Is it one that was shown since the start?"""
        return digest in self._digests


def _digest(pem: bytes) -> bytes:
    """Of the server's own certificate, the first in the file."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    return hashlib.sha256(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)).digest()


def _pair(certificate: bytes, key: bytes) -> bool:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return bool(
        x509.load_pem_x509_certificate(certificate).public_key() == load_pem_private_key(key, None).public_key()
    )


def _open_files() -> int:
    """How many files this process may have open; as many as it is allowed to ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, CONNECTIONS + 200) if hard != resource.RLIM_INFINITY else CONNECTIONS + 200
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
