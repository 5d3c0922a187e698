"""The stream that a node holds, as its server sees it, and the requests that are sent on it."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from coterie.federation.transport.base import Buffer
from coterie.federation.transport.channel import STREAM_ERRORS, chunks, grpc, pb, wire_bytes


@dataclass
class OutgoingRequest:
    """A request to one node, until it is answered."""

    node: str
    kind: str
    round: int
    ticket: str
    until: float  # deadline, by time.monotonic
    largest: int  # bytes that the answer may have
    own: Buffer
    shared: Buffer | None
    bytes_down: int = 0  # messages that were sent for it, as gRPC sends them
    bytes_up: int = 0  # messages that were received for it

    @property
    def payload_bytes(self) -> int:
        """Bytes of both payloads."""
        return memoryview(self.own).nbytes + (0 if self.shared is None else memoryview(self.shared).nbytes)

    @property
    def head(self) -> pb.FromServer:
        """The message that announces the request."""
        shared = None if self.shared is None else memoryview(self.shared).nbytes
        left = max(1.0, self.until - time.monotonic())
        return pb.FromServer(
            request=pb.Request(
                ticket=self.ticket, kind=self.kind, round=self.round, seconds=left, shared_bytes=shared,
                own_bytes=memoryview(self.own).nbytes,
            )
        )  # fmt: skip


class NodeIdentity(NamedTuple):
    """A node as its certificate names it."""

    name: str
    digest: bytes  # SHA-256 of the certificate


class NodeStream:
    """One node's open stream. Used on the event loop only, and made in the task that serves the stream."""

    def __init__(self, identity: NodeIdentity, context: Any, join: pb.Join):
        self.identity, self.name, self.context = identity, identity.name, context
        self.max_bytes = join.max_bytes  # payloads that the node accepts in one request
        self.ended = ""  # the reason, once the server has ended the stream
        self.end_code: Any = grpc.StatusCode.ABORTED
        self.writing = asyncio.Lock()
        self._ticket = join.ticket  # ticket of the request that the node has
        self._task = asyncio.current_task()
        self._sending: asyncio.Task[None] | None = None

    def end(self, reason: str, code: Any = grpc.StatusCode.ABORTED) -> None:
        """End the stream from the server's side."""
        self.ended, self.end_code = reason, code
        if self._task is not None:
            self._task.cancel()

    def has(self, request: OutgoingRequest) -> bool:
        """True if the node has received the request."""
        return self._ticket == request.ticket

    def start_sending(self, request: OutgoingRequest) -> None:
        """Send a request in a task of its own, unless the node has it."""
        self._sending = asyncio.create_task(self._send_request(request))

    @property
    def is_sending(self) -> bool:
        """True while the last request is being sent."""
        return self._sending is not None and not self._sending.done()

    def stop_sending(self) -> None:
        """Give up sending the last request."""
        if self._sending is not None:
            self._sending.cancel()

    async def send(self, message: pb.FromServer, request: OutgoingRequest | None = None) -> None:
        """Send one message; its bytes are counted for `request`."""
        async with self.writing:
            await self._write(message, request)

    async def _send_request(self, request: OutgoingRequest) -> None:
        with contextlib.suppress(*STREAM_ERRORS):  # the reader of a broken stream notices it too
            async with self.writing:
                if self.has(request):
                    return
                await self._write(request.head, request)
                for payload in (request.shared, request.own):
                    for chunk in chunks(payload) if payload is not None else ():
                        await self._write(pb.FromServer(chunk=chunk), request)
                self._ticket = request.ticket

    async def _write(self, message: pb.FromServer, request: OutgoingRequest | None) -> None:
        await self.context.write(message)
        if request is not None:
            request.bytes_down += wire_bytes(message)
