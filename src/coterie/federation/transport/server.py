"""The server's end of the transport, for a cloud as for an edge; it runs in this process.

    with GrpcServer(certs, "0.0.0.0", 9092) as server:
        server.nodes()                                              # names of the connected nodes
        answers, errors, traffic = server.send({"alice": data}, "train", round=3, deadline=600)

Nothing is stored on disk and nothing is polled: a request is sent at once on the stream that its node holds, and the
answer comes back on it. A node counts as gone when its stream ends or MAX_SILENCE_SECONDS pass without a frame. The
registered keys are read from the directory nodes/ of the certificates: once a second while requests are pending, and
whenever the connected nodes are asked for. Streams without a proof are limited in authentication.py; the number of
connections, idle connections and gRPC's own handshake are limited here.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from coterie.errors import CoterieError
from coterie.federation.identity.authority import Certs
from coterie.federation.transport.authentication import Authentication
from coterie.federation.transport.base import (
    MAX_PAYLOAD,
    Buffer,
    Cause,
    NodeReplies,
    UnreachableError,
    UntrustedError,
    WaitObserver,
)
from coterie.federation.transport.event_loop import event_loop, run_on_loop
from coterie.federation.transport.exchange import AnswerReader, Exchanges, GrpcExchange
from coterie.federation.transport.frames import (
    GRPC_OPTIONS,
    HANDSHAKE_SECONDS,
    MAX_SILENCE_SECONDS,
    RPC_METHOD,
    RPC_SERVICE,
    grpc,
    make_frame,
    send_heartbeats,
)
from coterie.federation.transport.proof import server_certificate
from coterie.federation.transport.stream import NodeStream

_PORT_SECONDS = 10.0  # time for the port of a process that was just killed to become free
_MAX_CONNECTIONS = 4096  # fewer if this process may not open as many files
_OTHER_FILES = 200  # files that this process may need in addition to its connections
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
        self.authentication = Authentication(self.certs)
        self.exchanges = Exchanges()
        self._server: Any = None

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
        self.authentication.certificate.load()
        for warning in self.certs.check_dates():
            log.warning("%s", warning)
        wait_for_port(self.host, self.port, _PORT_SECONDS)
        self._register()
        run_on_loop(self._listen())
        try:
            run_on_loop(self._check_trusted())
        except BaseException:
            self.close()
            raise
        log.info("listening on %s", self._local_address)

    def close(self) -> None:
        """Stop; the streams of nodes end, and the nodes try to reconnect."""
        if self._server is not None:
            server, self._server = self._server, None
            run_on_loop(server.stop(0.5))

    @property
    def _local_address(self) -> str:
        """The address at which this host itself reaches the server."""
        return f"{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

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
        handler = grpc.stream_stream_rpc_method_handler(self._handle)
        service = grpc.method_handlers_generic_handler(RPC_SERVICE, {RPC_METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))
        where = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        certificate = self.authentication.certificate
        credentials = grpc.dynamic_ssl_server_credentials(certificate.load(), certificate.reload)
        try:
            self._server.add_secure_port(where, credentials)
        except RuntimeError as e:
            raise CoterieError(f"port {self.port} on {self.host} cannot be used: {e}") from e
        await self._server.start()

    async def _check_trusted(self) -> None:
        try:
            await server_certificate(self._local_address, self.certs.ca)
        except UntrustedError as e:
            raise CoterieError(f"the certificate {self.certs.server} is not valid ({e}); renew it") from e
        except UnreachableError as e:
            raise CoterieError(f"the server that was just started does not answer: {e}") from e

    # ---- nodes -------------------------------------------------------------------------------------------------------
    def nodes(self) -> list[str]:
        """Names of the connected nodes. Nodes with keys that are not registered any more are disconnected."""
        self._register()
        return sorted(run_on_loop(self._connected()))

    async def _connected(self) -> set[str]:
        return self.exchanges.connected()

    def _register(self) -> None:
        """Read the registered keys, and let a new authority take over when it is time."""
        with contextlib.suppress(OSError):  # needs write access; `coterie certs switch` does the same
            if self.certs.switch():
                log.info("the new authority has taken over; devices need the ca.crt that was made with it")
        event_loop().call_soon_threadsafe(self._set_names, self.certs.accepted())

    def _set_names(self, names: dict[bytes, str]) -> None:
        self.authentication.names = names
        for stream in list(self.exchanges.streams.values()):
            if names.get(stream.key) != stream.name:
                stream.end("this key is not registered any more", grpc.StatusCode.UNAUTHENTICATED)

    async def _handle(self, requests: Any, context: Any) -> None:
        """Serve one stream. gRPC logs exceptions with their traceback, except for a cancelled stream."""
        try:
            await self._serve(context)
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None  # the node disconnected during a write

    async def _serve(self, context: Any) -> None:
        try:
            identity = await self.authentication.authenticate(context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the node did not prove its identity in time")
        except CoterieError as e:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(e))
        name = identity.name
        with contextlib.suppress(OSError):  # no write access: the old key is valid until the end of the overlap
            if self.certs.seen(name, identity.key):
                log.info("%s has changed its key; the old one is refused from now on", name)
        streams, stream = self.exchanges.streams, NodeStream(identity, context)
        earlier, streams[name] = streams.get(name), stream
        if earlier is not None:
            earlier.end("a newer connection with the same key has replaced this one")
        heartbeats = asyncio.create_task(send_heartbeats(context, stream.writing))
        try:
            await stream.send(make_frame(b"W", name=name))
            self.exchanges.ask(name)
            if await AnswerReader(stream, self.exchanges).run():
                self.exchanges.left_at[name] = time.monotonic()
        except TimeoutError:
            reason = f"the node sent nothing for {MAX_SILENCE_SECONDS:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        except CoterieError as e:
            if (exchange := self.exchanges.with_request_to(name)) is not None:
                exchange.fail(name, Cause.WRONG, f"{name}: {e}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        except asyncio.CancelledError:
            if not stream.ended:
                raise
            await context.abort(stream.end_code, stream.ended)
        finally:
            heartbeats.cancel()
            stream.stop_sending()
            if streams.get(name) is stream:
                del streams[name]

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
                with contextlib.suppress(CoterieError):  # a damaged key file is reported before the next round
                    self._register()
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
