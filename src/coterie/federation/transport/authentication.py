"""Authentication of nodes by a server: its certificate, the registered keys, and the proof of a key."""

import asyncio
import hashlib
import secrets
import threading
from typing import Any, NamedTuple

from coterie.errors import CoterieError
from coterie.federation.identity.authority import Certs
from coterie.federation.transport.frames import (
    HANDSHAKE_SECONDS,
    TRANSPORT_VERSION,
    frame_fields,
    grpc,
    make_frame,
    text_field,
)
from coterie.federation.transport.proof import NONCE_BYTES, SESSION_BYTES, is_signed

MAX_UNAUTHENTICATED = 64  # streams without a proof at the same time


class NodeIdentity(NamedTuple):
    """A node that has proved its key."""

    name: str
    key: bytes  # public, PEM
    ticket: str  # ticket of the request that the node says it already has


class ServerCertificate:
    """The certificate that the server presents; a renewed one is used for new connections without a restart."""

    def __init__(self, certs: Certs):
        self._certs = certs
        self._modified: tuple[int, ...] = ()  # modification times of the two files that were loaded
        self._digests = set[bytes]()
        self._configuration: Any = None
        self._lock = threading.Lock()

    def load(self) -> Any:
        """Return gRPC's configuration of the certificate; raise CoterieError if certificate and key do not match."""
        self.reload()
        if self._configuration is None:
            raise CoterieError(f"the certificate {self._certs.server} does not match its key; renew it")
        return self._configuration

    def reload(self) -> Any:
        """Return the new configuration if the files have changed, otherwise None; gRPC calls this at each handshake."""
        with self._lock:
            try:
                modified = tuple(p.stat().st_mtime_ns for p in (self._certs.server, self._certs.server_key))
                if modified == self._modified:
                    return None
                certificate, key = self._certs.server.read_bytes(), self._certs.server_key.read_bytes()
                if not _matches(certificate, key):
                    return None  # the two files are being replaced
                self._digests.add(_certificate_digest(certificate))
                self._configuration = grpc.ssl_server_certificate_configuration([(key, certificate)])
                self._modified = modified
                return self._configuration
            except (OSError, ValueError):
                return None

    def was_presented(self, digest: bytes) -> bool:
        """True if this server has presented a certificate with this digest since it started."""
        return digest in self._digests


class Authentication:
    """Asks the other end of each stream to prove a registered key. Used on the event loop only."""

    def __init__(self, certs: Certs):
        self.certificate = ServerCertificate(certs)
        self.names: dict[bytes, str] = {}  # node names by registered public key (PEM)
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._pending: dict[asyncio.Task[Any], None] = {}  # streams without a proof, oldest first

    async def authenticate(self, context: Any) -> NodeIdentity:
        """Return the identity of the node; raise TimeoutError or CoterieError if it is not proved in time.

        When all slots for unauthenticated streams are taken, the oldest pending stream is ended.
        """
        task = asyncio.current_task()
        assert task is not None
        if len(self._pending) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.cancel()
        self._pending[task] = None
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                return await self.challenge(context)
        except asyncio.CancelledError:
            if task in self._pending:
                raise  # the stream has ended
            task.uncancel()
            raise TimeoutError from None
        finally:
            self._pending.pop(task, None)

    async def challenge(self, context: Any) -> NodeIdentity:
        """Send a challenge and check the proof that comes back."""
        if list(context.auth_context().get("ssl_tls_version", ())) != [b"TLSv1.3"]:
            raise CoterieError("TLS 1.3 is needed")
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = {"version": TRANSPORT_VERSION, "session": self._session.hex(), "nonce": nonce.hex()}
        await context.write(make_frame(b"C", **challenge))
        frame = await context.read()
        if frame is grpc.aio.EOF or frame[:1] != b"P":
            raise CoterieError("the node did not prove its identity")
        fields = frame_fields(frame)
        key = text_field(fields, "key").encode()
        try:
            certificate, signature = (bytes.fromhex(text_field(fields, n)) for n in ("certificate", "signature"))
        except ValueError as e:
            raise CoterieError("the proof is damaged") from e
        if not self.certificate.was_presented(certificate):
            raise CoterieError("the proof is for a different server")
        name = self.names.get(key)
        if name is None:
            raise CoterieError("this key is not registered")
        if not is_signed(key, signature, nonce, self._session, certificate):
            raise CoterieError("the signature does not match the key")
        return NodeIdentity(name, key, text_field(fields, "ticket"))


def _certificate_digest(pem: bytes) -> bytes:
    """Return the digest of the first certificate in a file, which is the server's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    return hashlib.sha256(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)).digest()


def _matches(certificate: bytes, key: bytes) -> bool:
    """True if a certificate was issued for this private key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    public = load_pem_private_key(key, None).public_key()
    return bool(x509.load_pem_x509_certificate(certificate).public_key() == public)
