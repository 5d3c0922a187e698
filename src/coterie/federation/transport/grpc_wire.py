"""What both ends of the gRPC transport agree on: frames, limits, and how a node proves who it is.

A node holds one stream to its server, over TLS 1.3, for as long as it lives. What crosses it are frames: a letter and
its content, each a message of gRPC and at most CHUNK bytes (gRPC refuses a longer one by its length, before there is
memory for it).

    server                                              node
    C  {version, session, nonce}          ->
                                          <-            P  {key, certificate, signature, ticket}
    W  {name}                             ->                                    (or the stream ends with the reason)
    Q  {kind, round, ticket, seconds, own, shared}  ->                          a question: lengths first,
    D  bytes ...                          ->                                    then the payloads
                                          <-            A  {ticket, kind, round, size or error}     an offer,
    G  {ticket}, or N {ticket, reason}    ->                                    taken, or not wanted
                                          <-            D  bytes ...
                                          <-            B                       goodbye
    H                                     <>            H                       a heartbeat, of both sides

The node signs the nonce, which is fresh for each stream and used once; the session, which is fresh for each start of
the server; and the digest of the certificate that the server showed on this very address. So a signature is worth
nothing on another stream, at another server, or later. A ticket is random and known to one node: an answer counts if
it has the ticket of the question that waits, however many connections that took.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import secrets
import ssl
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from coterie.errors import CoterieError, sentence
from coterie.federation.transport.base import Buffer, UnreachableError, UntrustedError

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it would print are the failures that we put into sentences
# In TLS 1.2 gRPC offers no other cipher than this one, which does not go with the certificates of `coterie certs`
# (elliptic curves): a handshake of TLS 1.2 fails, TLS 1.3 has ciphers of its own. The server checks the version too.
os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")

try:
    import grpc
    import grpc.aio
except ImportError as e:
    raise CoterieError('a federation needs the extra "flower": pip install coterie[flower]') from e

VERSION = 1
SERVICE, METHOD = "coterie.Transport", "Hold"
CHUNK = 2**18  # bytes of a payload in one frame
HEAD = 2**14  # bytes of every other frame
HANDSHAKE = 10.0  # seconds to connect and to say who one is
HEARTBEAT = 5.0  # seconds after which either side says that it lives, unless it is sending anyway
SILENCE = 20.0  # seconds without a frame after which the other side is taken for gone
PREFIX = 5  # bytes that gRPC puts before a message
# what a write on a dead stream may raise
LOST = (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.InternalError)
T = TypeVar("T")

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", CHUNK + 1),
    ("grpc.max_send_message_length", CHUNK + 1),
    ("grpc.max_metadata_size", 2**13),
    ("grpc.absolute_max_metadata_size", 2**14),
]


# ---- frames ----------------------------------------------------------------------------------------------------------
def frame(letter: bytes, **fields: Any) -> bytes:
    return letter + json.dumps(fields).encode()


def fields_of(content: bytes) -> dict[str, Any]:
    """Of a frame other than D; a sentence if it is none of ours."""
    try:
        if len(content) > HEAD:
            raise ValueError("too long")
        found = json.loads(content[1:])
        if not isinstance(found, dict):
            raise ValueError("no fields")
        return found
    except (ValueError, RecursionError) as e:
        raise CoterieError(f"damaged message: {sentence(str(e))}") from e


def text(fields: dict[str, Any], name: str) -> str:
    found = fields.get(name)
    if not isinstance(found, str) or any("\ud800" <= c <= "\udfff" for c in found):  # halves of characters
        raise CoterieError(f"the message has no {name}; is the other side of the same Coterie version?")
    return found


def number(fields: dict[str, Any], name: str) -> int:
    found = fields.get(name)
    if type(found) is not int or not 0 <= found < 2**53:
        raise CoterieError(f"the message has no {name}; is the other side of the same Coterie version?")
    return found


def frames(payload: Buffer) -> Iterator[bytes]:
    """The payload in pieces; one is copied at a time."""
    view = memoryview(payload).cast("B")
    for at in range(0, len(view), CHUNK):
        yield b"D" + view[at : at + CHUNK]


class Filling:
    """A payload that is arriving, in memory of its announced length; `skip` receives it into nothing."""

    def __init__(self, buffer: memoryview | None, length: int):
        self.buffer, self.length, self.at = buffer, length, 0

    def take(self, content: bytes) -> bool:
        """True once it is complete."""
        piece = memoryview(content)[1:]
        if not piece or self.at + len(piece) > self.length:
            raise CoterieError("the payload is longer than it says")
        if self.buffer is not None:
            self.buffer[self.at : self.at + len(piece)] = piece
        self.at += len(piece)
        return self.at == self.length


async def hear(stream: Any) -> bytes:
    """The next frame of a call or context; empty: the stream has ended. Raises TimeoutError after SILENCE."""
    while True:
        async with asyncio.timeout(SILENCE):
            found = await stream.read()
        if found is grpc.aio.EOF:
            return b""
        if found != b"H":
            return bytes(found) or b" "  # nothing is not a frame either


async def beat(stream: Any, writing: asyncio.Lock) -> None:
    """Say every few seconds that we live, unless something is being sent."""
    with contextlib.suppress(*LOST):
        while True:
            await asyncio.sleep(HEARTBEAT)
            if not writing.locked():
                async with writing:
                    await stream.write(b"H")


# ---- who is there ----------------------------------------------------------------------------------------------------
def to_sign(nonce: bytes, session: bytes, certificate: bytes, key: bytes) -> bytes:
    """What a node signs: every part has a fixed length."""
    return b"coterie node 1\0" + nonce + session + certificate + hashlib.sha256(key).digest()


def sign(private: Any, nonce: bytes, session: bytes, certificate: bytes) -> tuple[bytes, bytes]:
    """The public key as PEM, and the signature."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = bytes(private.public_key().public_bytes(serialization.Encoding.PEM, form))
    made = private.sign(to_sign(nonce, session, certificate, pem), ec.ECDSA(hashes.SHA256()))
    return pem, bytes(made)


def signed(pem: bytes, signature: bytes, nonce: bytes, session: bytes, certificate: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(pem)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, to_sign(nonce, session, certificate, pem), ec.ECDSA(hashes.SHA256()))
        return True
    except (ValueError, TypeError, InvalidSignature):
        return False


def nonce() -> bytes:
    return secrets.token_bytes(32)


async def certificate_of(address: str, ca: Path) -> tuple[bytes, bool]:
    """The certificate (DER) of the server at an address, if `ca` vouches for it, and whether it speaks gRPC.

    gRPC does not tell its caller what certificate it saw; so it is looked at first, and then gRPC is told to trust this
    one certificate and no other.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise CoterieError(f'address "{address}" must be HOST:PORT')
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as e:
        raise CoterieError(f"the authority's certificate {ca} cannot be read: {e}") from e
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        async with asyncio.timeout(HANDSHAKE):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except ssl.SSLCertVerificationError as e:
        raise UntrustedError(f"the server's certificate is not trusted: {e.verify_message}") from e
    except (OSError, TimeoutError) as e:  # errors of TLS are of OSError
        if "WRONG_VERSION_NUMBER" in str(e):
            raise CoterieError("the server does not speak TLS; plain HTTP is not used") from e
        raise UnreachableError(f"{address} does not answer: {e or type(e).__name__}") from e
    try:
        tls = writer.get_extra_info("ssl_object")
        return bytes(tls.getpeercert(True)), tls.selected_alpn_protocol() == "h2"
    finally:
        writer.transport.abort()


# ---- one event loop for everything of gRPC in this process -----------------------------------------------------------
_loop: asyncio.AbstractEventLoop | None = None
_guard = threading.Lock()


def no_farewell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Errors of callbacks are logged, but for two that mean nothing: when its last server or client ends, gRPC closes
    the queue that the loop still listens to, and what was waited for is left.
    """
    e = context.get("exception")
    closed = isinstance(e, OSError) and e.errno == errno.EBADF
    if not closed and not str(context.get("message")).startswith("Task was destroyed"):
        loop.default_exception_handler(context)


def loop() -> asyncio.AbstractEventLoop:
    """It runs in a thread of its own. gRPC wants one for all its servers and clients in a process."""
    global _loop
    with _guard:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.set_exception_handler(no_farewell)
            threading.Thread(target=_loop.run_forever, name="grpc", daemon=True).start()
        return _loop


def start(work: Coroutine[Any, Any, T]) -> "Future[T]":
    return asyncio.run_coroutine_threadsafe(work, loop())


def run(work: Coroutine[Any, Any, T]) -> T:
    """Do it there, and wait for it here."""
    return start(work).result()


__all__ = [
    "CHUNK", "HANDSHAKE", "HEAD", "LOST", "METHOD", "OPTIONS", "PREFIX", "SERVICE", "VERSION", "Filling", "beat",
    "certificate_of", "fields_of", "frame", "frames", "grpc", "hear", "loop", "nonce", "number", "run", "sign",
    "signed", "start", "text",
]  # fmt: skip
