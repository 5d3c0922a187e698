"""The server's end of the transport, for a cloud as for an edge; it runs in this process.

    with GrpcServer(certs, "0.0.0.0", 9092) as server:
        server.nodes()                                              # names of the connected nodes
        answers, errors, traffic = server.send({"alice": data}, "train", round=3, deadline=600)

Nothing is stored on disk and nothing is polled: a request is sent at once on the stream that its node holds, and the
answer comes back on it. A node counts as gone when its stream ends, or when it does not answer gRPC's keep-alive. The
name of a node is in its certificate. Whether the certificate is registered and valid is looked up in the directory
nodes/ of the certificates: for each new stream, and every second for the open ones.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from coterie.errors import CoterieError
from coterie.federation.identity.authority import Certs, certificate_digest
from coterie.federation.transport.base import MAX_PAYLOAD, Buffer, Cause, NodeReplies, WaitObserver
from coterie.federation.transport.channel import GRPC_OPTIONS, HANDSHAKE_SECONDS, grpc, pb, read_message, rpc
from coterie.federation.transport.credentials import ServerCredentials
from coterie.federation.transport.event_loop import run_on_loop
from coterie.federation.transport.exchange import AnswerReader, Exchanges, GrpcExchange
from coterie.federation.transport.stream import NodeIdentity, NodeStream

_PORT_SECONDS = 10.0  # time for the port of a process that was just killed to become free
_MAX_CONNECTIONS = 4096  # fewer if this process may not open as many files
_OTHER_FILES = 200  # files that this process may need in addition to its connections
_REGISTRY_SECONDS = 1.0  # pause between looks at the registered certificates
_WARN_SECONDS = 86_400.0  # pause between warnings about certificates that expire soon
log = logging.getLogger("coterie.cloud")


class GrpcServer:
    """Accepts the streams of registered nodes and exchanges messages with them."""

    def __init__(
        self, certs: Path | Certs, host: str, port: int, on_wait: WaitObserver = lambda connected, asked: None
    ):
        self.certs = certs if isinstance(certs, Certs) else Certs(certs)
        self.host, self.port = host, port
        # called about once a second while `send` waits, with the connected nodes and those with a pending request
        self.on_wait = on_wait
        self.exchanges = Exchanges()
        self._credentials = ServerCredentials(self.certs)
        self._joining: dict[str, asyncio.Task[Any]] = {}  # streams that have not joined yet, by node
        self._server: Any = None
        self._registry_watch: asyncio.Task[None] | None = None

    def __enter__(self) -> "GrpcServer":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- life --------------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Start to listen; raise CoterieError if nodes would not trust the certificate or the port is in use."""
        self.certs.check()
        self.certs.switch()
        self._credentials.make()
        self._warn_of_expiry()
        wait_for_port(self.host, self.port, _PORT_SECONDS)
        run_on_loop(self._listen())
        log.info("listening on %s:%s", self.host, self.port)

    def close(self) -> None:
        """Stop; the streams of nodes end, and the nodes try to reconnect."""
        if self._server is not None:
            server, self._server = self._server, None
            run_on_loop(self._stop(server))

    async def _listen(self) -> None:
        options = [
            *GRPC_OPTIONS,
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", 2),
            ("grpc.max_connection_idle_ms", int(2000 * HANDSHAKE_SECONDS)),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
            ("grpc.max_allowed_incoming_connections", _connection_limit()),
        ]
        self._server = grpc.aio.server(options=options)
        rpc.add_FederationServiceServicer_to_server(self, self._server)
        where = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        try:
            self._server.add_secure_port(where, self._credentials.make())
        except RuntimeError as e:
            raise CoterieError(f"port {self.port} on {self.host} cannot be used: {e}") from e
        await self._server.start()
        self._registry_watch = asyncio.create_task(self._watch_registry())

    async def _stop(self, server: Any) -> None:
        if self._registry_watch is not None:
            self._registry_watch.cancel()
        await server.stop(0.5)

    # ---- nodes -------------------------------------------------------------------------------------------------------
    def nodes(self) -> list[str]:
        """Names of the connected nodes. Nodes whose certificates are not valid any more are disconnected."""
        return sorted(run_on_loop(self._registered()))

    async def _registered(self) -> set[str]:
        """End the streams of nodes whose certificates are not valid any more, and return the other nodes."""
        for stream in list(self.exchanges.streams.values()):
            if reason := self._refusal(stream.identity):
                stream.end(reason, grpc.StatusCode.UNAUTHENTICATED)
        return self.exchanges.connected()

    async def _watch_registry(self) -> None:
        """Apply changes of the registry while nodes are connected, and let a new authority take over in time."""
        warned = time.monotonic()
        while True:
            await asyncio.sleep(_REGISTRY_SECONDS)
            try:
                if self.certs.switch():
                    log.info("the new authority has taken over; nodes need the ca.crt and .crt that were made with it")
                await self._registered()
                if time.monotonic() - warned > _WARN_SECONDS:
                    warned = time.monotonic()
                    self._warn_of_expiry()
            except OSError:  # switching needs write access; `coterie certs switch` does the same
                pass
            except CoterieError as e:
                log.error("%s", e)

    def _warn_of_expiry(self) -> None:
        for warning in (*self.certs.check_dates(), *self.certs.expiring_nodes()):
            log.warning("%s", warning)

    def _identify(self, context: Any) -> NodeIdentity:
        """Return the node of a stream by its certificate; raise CoterieError if it may not connect."""
        about = context.auth_context()
        if list(about.get("ssl_tls_version", ())) != [b"TLSv1.3"]:
            raise CoterieError("TLS 1.3 is needed")
        (pem,), (name,) = about["x509_pem_cert"], about["x509_common_name"]
        digest = certificate_digest(ssl.PEM_cert_to_DER_cert(pem.decode()))
        identity = NodeIdentity(name.decode("ascii", "replace"), digest)
        if reason := self._refusal(identity):
            raise CoterieError(reason)
        return identity

    def _refusal(self, identity: NodeIdentity) -> str:
        """Return the reason why a certificate is not valid now; empty if it is valid."""
        try:
            valid = identity.digest in self.certs.valid(identity.name)
        except CoterieError as e:
            return str(e)
        return "" if valid else "this certificate is not registered, or not valid any more"

    async def Connect(self, requests: Any, context: Any) -> None:  # noqa: N802
        """Serve one stream. gRPC logs exceptions with their traceback, except for a cancelled stream."""
        try:
            await self._serve(context)
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None  # the node disconnected during a write

    async def _serve(self, context: Any) -> None:
        try:
            stream = await self._admit(context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the node did not join in time")
        except CoterieError as e:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(e))
        name, streams = stream.name, self.exchanges.streams
        with contextlib.suppress(OSError):  # no write access: the old certificate is valid until the overlap ends
            if self.certs.seen(name, stream.identity.digest):
                log.info("%s has changed its certificate; the old one is refused from now on", name)
        earlier, streams[name] = streams.get(name), stream
        if earlier is not None:
            earlier.end("a newer connection of the same node has replaced this one")
        try:
            await stream.send(pb.FromServer(welcome=pb.Welcome(name=name)))
            self.exchanges.ask(name)
            if await AnswerReader(stream, self.exchanges).run():
                self.exchanges.left_at[name] = time.monotonic()
        except CoterieError as e:
            if (exchange := self.exchanges.with_request_to(name)) is not None:
                exchange.fail(name, Cause.WRONG, f"{name}: {e}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        except asyncio.CancelledError:
            if not stream.ended:
                raise
            await context.abort(stream.end_code, stream.ended)
        finally:
            stream.stop_sending()
            if streams.get(name) is stream:
                del streams[name]

    async def _admit(self, context: Any) -> NodeStream:
        """Identify the node and read its Join; a node has one stream that has not joined, the newest."""
        identity, task = self._identify(context), asyncio.current_task()
        assert task is not None
        earlier, self._joining[identity.name] = self._joining.get(identity.name), task
        if earlier is not None:
            earlier.cancel()
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                message = await read_message(context)
        except asyncio.CancelledError:
            if self._joining.get(identity.name) is task:
                raise  # the stream has ended
            task.uncancel()
            raise TimeoutError from None
        finally:
            if self._joining.get(identity.name) is task:
                del self._joining[identity.name]
        if message is None or message.WhichOneof("content") != "join":
            raise CoterieError("the first message must be a Join")
        return NodeStream(identity, context, message.join)

    # ---- messages ----------------------------------------------------------------------------------------------------
    def send(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = MAX_PAYLOAD,
    ) -> NodeReplies:  # fmt: skip
        """Send requests and wait for the answers, at most `deadline` seconds.

        `shared` goes to all nodes, in addition to their own payloads. An answer of more than `largest` bytes is refused
        before it is received.
        """
        exchange = self.exchanges.make(payloads, kind, round, deadline, shared, largest)
        if not exchange.pending:
            return NodeReplies({}, {}, {})
        try:
            self.exchanges.looked_at = time.monotonic()
            run_on_loop(self.exchanges.begin(exchange))
            while exchange.is_open:
                self.on_wait(*run_on_loop(self.exchanges.look(exchange)))
                exchange.wait()
        finally:
            run_on_loop(self.exchanges.end(exchange))
        return exchange.take_replies()

    def begin(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = MAX_PAYLOAD,
    ) -> GrpcExchange:  # fmt: skip
        """Send requests as `send` does, without waiting: `poll` of the result returns the answers that have come."""
        exchange = self.exchanges.make(payloads, kind, round, deadline, shared, largest)
        run_on_loop(self.exchanges.begin(exchange))
        return exchange


def wait_for_port(host: str, port: int, seconds: float) -> None:
    """Wait until a port is free; raise CoterieError if it is still in use after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                return s.bind((host, port))
            except OSError as e:
                if time.monotonic() > until:
                    raise CoterieError(f"port {port} on {host} cannot be used: {e.strerror}") from e
        time.sleep(0.3)


def _connection_limit() -> int:
    """Raise this process's limit of open files as far as needed and allowed; return the connections that fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_CONNECTIONS + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(100, min(_MAX_CONNECTIONS, files - _OTHER_FILES))
