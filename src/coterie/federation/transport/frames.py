"""Frames: the messages on the stream that a node holds to its server, and the limits that both ends apply.

A node holds one stream to its server, over TLS 1.3, for as long as it runs. Each frame is one gRPC message of at most
CHUNK_BYTES plus one byte: a letter and its content. gRPC refuses a longer message by its announced length, before
memory is allocated for it.

    server                                              node
    C  {version, session, nonce}          ->
                                          <-            P  {key, certificate, signature, ticket}
    W  {name}                             ->                                    or the stream ends with the reason
    Q  {kind, round, ticket, seconds, own, shared}  ->                          a request: first the lengths,
    D  bytes ...                          ->                                    then the payloads
                                          <-            A  {ticket, kind, round, size}    an answer is ready,
                                                           or {ticket, kind, round, error, no_plan}
    G  {ticket}, or N {ticket, reason}    ->                                    it is requested, or not wanted
                                          <-            D  bytes ...
                                          <-            B                       the node leaves
    H                                     <>            H                       heartbeat of either side

A ticket is random and known to one node. An answer counts if it has the ticket of the pending request, even if the
connection was replaced in between. Frames C and P are explained in proof.py.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from coterie.errors import CoterieError, sentence
from coterie.federation.transport.base import Buffer

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would print the failures that we report as CoterieError
# The only cipher offered for TLS 1.2 does not work with the elliptic-curve certificates of `coterie certs`, so that
# TLS 1.2 handshakes fail. TLS 1.3 has its own ciphers. The server checks the version as well.
os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")

try:
    import grpc as grpc  # other modules of the transport import it from here, after the settings above
    import grpc.aio
except ImportError as e:
    raise CoterieError('a federation needs the extra "federation": pip install coterie[federation]') from e

TRANSPORT_VERSION = 2
RPC_SERVICE, RPC_METHOD = "coterie.Transport", "Hold"
CHUNK_BYTES = 2**18  # payload in one D frame
MAX_HEAD_BYTES = 2**14  # length of any other frame
HANDSHAKE_SECONDS = 10.0  # time limit for connecting and for the proof of the node's key
HEARTBEAT_SECONDS = 5.0  # pause between heartbeats of a side that sends nothing else
MAX_SILENCE_SECONDS = 20.0  # time without a frame after which the other side counts as gone
GRPC_PREFIX_BYTES = 5  # bytes that gRPC puts before each message
# exceptions that a write to a broken stream can raise
STREAM_ERRORS = (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.InternalError)
GRPC_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", CHUNK_BYTES + 1),
    ("grpc.max_send_message_length", CHUNK_BYTES + 1),
    ("grpc.max_metadata_size", 2**13),
    ("grpc.absolute_max_metadata_size", 2**14),
]


def make_frame(letter: bytes, **fields: Any) -> bytes:
    """Return a frame whose content is a JSON object."""
    return letter + json.dumps(fields).encode()


def frame_fields(frame: bytes) -> dict[str, Any]:
    """Return the JSON object of a frame that make_frame made; raise CoterieError if it is damaged."""
    try:
        if len(frame) > MAX_HEAD_BYTES:
            raise ValueError("too long")
        fields = json.loads(frame[1:])
        if not isinstance(fields, dict):
            raise ValueError("no fields")
        return fields
    except (ValueError, RecursionError) as e:
        raise CoterieError(f"damaged message: {sentence(str(e))}") from e


def text_field(fields: dict[str, Any], name: str) -> str:
    """Return a field that must be text; raise CoterieError if it is not."""
    value = fields.get(name)
    if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):  # surrogates cannot be encoded
        raise CoterieError(f"the message has no {name}; does the other side run the same version of Coterie?")
    return value


def int_field(fields: dict[str, Any], name: str) -> int:
    """Return a field that must be an integer from 0 to 2**53; raise CoterieError if it is not."""
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise CoterieError(f"the message has no {name}; does the other side run the same version of Coterie?")
    return value


def payload_frames(payload: Buffer) -> Iterator[bytes]:
    """Yield the D frames of a payload; only one chunk is copied at a time."""
    view = memoryview(payload).cast("B")
    for start in range(0, len(view), CHUNK_BYTES):
        yield b"D" + view[start : start + CHUNK_BYTES]


class ArrivingPayload:
    """A payload that is being received into a buffer of its announced length, or discarded."""

    def __init__(self, buffer: memoryview | None, length: int):
        self.buffer, self.length, self.received = buffer, length, 0

    def add(self, frame: bytes) -> bool:
        """Add the content of a D frame; return True once the payload is complete."""
        chunk = memoryview(frame)[1:]
        if not chunk or self.received + len(chunk) > self.length:
            raise CoterieError("the payload is longer than announced")
        if self.buffer is not None:
            self.buffer[self.received : self.received + len(chunk)] = chunk
        self.received += len(chunk)
        return self.received == self.length


async def read_frame(stream: Any) -> bytes:
    """Return the next frame that is not a heartbeat; empty when the stream has ended.

    Raises TimeoutError after MAX_SILENCE_SECONDS without a frame.
    """
    while True:
        async with asyncio.timeout(MAX_SILENCE_SECONDS):
            message = await stream.read()
        if message is grpc.aio.EOF:
            return b""
        if message != b"H":
            return bytes(message) or b" "  # an empty message is not the end; its letter is unknown


async def send_heartbeats(stream: Any, writing: asyncio.Lock) -> None:
    """Write a heartbeat every few seconds, unless other frames are being written."""
    with contextlib.suppress(*STREAM_ERRORS):
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if not writing.locked():
                async with writing:
                    await stream.write(b"H")
