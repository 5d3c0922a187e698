"""gRPC's options, the limits, and payloads in chunks, for both ends of a stream.

The messages are in protocol/coterie.proto, and docs/protocol.md has their order. Flow control, deadlines of calls and
keep-alive are gRPC's own.
"""

import asyncio
import logging
import os
from collections.abc import Iterator
from typing import Any

from coterie.errors import CoterieError
from coterie.federation.transport.base import Buffer

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would print the failures that we report as CoterieError

try:
    import grpc as grpc  # other modules of the transport import it from here, after the setting above
    import grpc.aio
    from google.protobuf.message import DecodeError

    from coterie.federation.protocol import coterie_pb2, coterie_pb2_grpc
except ImportError as e:
    raise CoterieError('a federation needs the extra "federation": pip install coterie[federation]') from e

pb, rpc = coterie_pb2, coterie_pb2_grpc  # the generated code, which imports gRPC too
logging.getLogger("grpc._common").disabled = True  # it logs a traceback for each message that cannot be read

CHUNK_BYTES = 2**18  # payload in one message
MAX_MESSAGE_BYTES = CHUNK_BYTES + 2**10  # gRPC refuses a longer message before memory is allocated for it
HANDSHAKE_SECONDS = 10.0  # time limit for the TLS handshake, and for the first message after it
KEEPALIVE_SECONDS = 10.0  # pause between gRPC's pings
_PING_SECONDS = 20.0  # time for the answer to a ping, which waits behind data on a slow link
GRPC_PREFIX_BYTES = 5  # bytes that gRPC puts before each message
# exceptions that a write to a broken stream can raise
STREAM_ERRORS = (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.InternalError)
GRPC_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 2**13),
    ("grpc.absolute_max_metadata_size", 2**14),
    ("grpc.keepalive_time_ms", int(1000 * KEEPALIVE_SECONDS)),
    ("grpc.keepalive_timeout_ms", int(1000 * _PING_SECONDS)),
    ("grpc.http2.ping_timeout_ms", int(1000 * _PING_SECONDS)),  # the one that ends a connection
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", int(500 * KEEPALIVE_SECONDS)),
]


async def read_message(stream: Any) -> Any:
    """Return the next message of a stream, or None when it has ended; raise CoterieError if it cannot be read."""
    try:
        message = await stream.read()
    except DecodeError:
        message = None
    if message is grpc.aio.EOF:
        return None
    if message is None or message.WhichOneof("content") is None:
        raise CoterieError("it sent a message that is not part of Coterie's protocol")
    return message


def wire_bytes(message: Any) -> int:
    """Return the bytes of a message as gRPC sends it."""
    return int(message.ByteSize()) + GRPC_PREFIX_BYTES


def chunks(payload: Buffer) -> Iterator[bytes]:
    """Yield the chunks of a payload; only one is copied at a time."""
    view = memoryview(payload).cast("B")
    for start in range(0, len(view), CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


class ArrivingPayload:
    """A payload that is being received into a buffer of its announced length, or discarded."""

    def __init__(self, buffer: memoryview | None, length: int):
        self.buffer, self.length, self.received = buffer, length, 0

    def add(self, chunk: bytes) -> bool:
        """Add a chunk; return True once the payload is complete."""
        if not chunk or self.received + len(chunk) > self.length:
            raise CoterieError("the payload is longer than announced")
        if self.buffer is not None:
            self.buffer[self.received : self.received + len(chunk)] = chunk
        self.received += len(chunk)
        return self.received == self.length
