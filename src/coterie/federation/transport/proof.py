"""How a node proves its key to a server, once per connection.

The server opens each stream with a nonce (fresh for the stream) and its session (fresh for each start of the server).
The node signs both together with the digest of the certificate that the server presented at this address. Therefore
the signature is useless on another stream, at another server, or later.
"""

import asyncio
import hashlib
import ssl
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.federation.transport.base import UnreachableError, UntrustedError
from coterie.federation.transport.frames import HANDSHAKE_SECONDS

NONCE_BYTES, SESSION_BYTES = 32, 16


def sign_challenge(key: Any, nonce: bytes, session: bytes, certificate: bytes) -> tuple[bytes, bytes]:
    """Return the public half of a private key as PEM, and the signature of a challenge."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
    return pem, bytes(key.sign(_signed_bytes(nonce, session, certificate, pem), ec.ECDSA(hashes.SHA256())))


def is_signed(pem: bytes, signature: bytes, nonce: bytes, session: bytes, certificate: bytes) -> bool:
    """True if the signature of a challenge was made with the private half of the key `pem`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(pem)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, _signed_bytes(nonce, session, certificate, pem), ec.ECDSA(hashes.SHA256()))
        return True
    except (ValueError, TypeError, InvalidSignature):
        return False


def _signed_bytes(nonce: bytes, session: bytes, certificate: bytes, key: bytes) -> bytes:
    """Return the bytes that a node signs; each part has a fixed length."""
    return b"coterie node 1\0" + nonce + session + certificate + hashlib.sha256(key).digest()


async def server_certificate(address: str, ca: Path) -> bytes:
    """Return the certificate (DER) of the server at an address, verified with the authority in `ca`.

    gRPC does not tell its caller which certificate it saw. So it is fetched first, with a handshake of its own, and
    gRPC is then told to trust this one certificate only.
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
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except ssl.SSLCertVerificationError as e:
        raise UntrustedError(f"the server's certificate is not trusted: {e.verify_message}") from e
    except (OSError, TimeoutError) as e:  # ssl.SSLError is an OSError
        if "WRONG_VERSION_NUMBER" in str(e):
            raise CoterieError(f"{address} does not speak TLS; is it the port of a Coterie cloud or edge?") from e
        raise UnreachableError(f"{address} does not answer: {e or type(e).__name__}") from e
    try:
        tls = writer.get_extra_info("ssl_object")
        if tls.selected_alpn_protocol() != "h2":
            raise CoterieError(f"{address} does not speak gRPC; is it the port of a Coterie cloud or edge?")
        return bytes(tls.getpeercert(True))
    finally:
        writer.transport.abort()
