"""Signatures of a node with the key of its certificate, and their check by other nodes of the same federation."""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, sentence
from coterie.federation.identity.authority import load_key

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding
except ImportError as e:
    raise CoterieError('certificates need the extra "federation": pip install coterie[federation]') from e


@dataclass(frozen=True)
class NodeFiles:
    """The files of a node's identity; they are read when they are needed, because they may be rotated."""

    key: Path
    certificate: Path
    ca: Path

    def der(self) -> bytes:
        """Return the node's certificate."""
        return bytes(x509.load_pem_x509_certificate(self.certificate.read_bytes()).public_bytes(Encoding.DER))

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text: two numbers of the length of the key."""
        key = load_key(self.key)
        size = (key.curve.key_size + 7) // 8
        r, s = decode_dss_signature(key.sign(text, ec.ECDSA(SHA256())))
        return bytes(r.to_bytes(size) + s.to_bytes(size))


def check_signed(der: bytes, ca: Path, text: bytes, signature: bytes) -> str:
    """Return the name of the node whose certificate signed the text.

    Raise CoterieError if the certificate is not one of a node of this authority, or the signature is wrong.
    """
    certificate = _node_certificate(der, ca)
    size = len(signature) // 2
    r, s = (int.from_bytes(part) for part in (signature[:size], signature[size:]))
    name = certificate.subject.rfc4514_string().removeprefix("CN=")
    try:
        certificate.public_key().verify(encode_dss_signature(r, s), text, ec.ECDSA(SHA256()))
    except Exception:  # verification raises several exception types; all mean failure
        raise CoterieError(f"the signature of {sentence(name, 63)} is wrong") from None
    return str(name)


def certificate_fingerprint(der: bytes) -> str:
    """Return a short digest of a certificate, by which two hosts find out whether both have it."""
    return hashlib.sha256(der).hexdigest()[:16]


def _node_certificate(der: bytes, ca: Path) -> Any:
    try:
        certificate = x509.load_der_x509_certificate(der)
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        authorities = x509.load_pem_x509_certificates(ca.read_bytes())
    except Exception:  # parsing raises several exception types
        raise CoterieError("a certificate of another node cannot be read") from None
    if not any(_issued(certificate, authority) for authority in authorities):
        raise CoterieError("a certificate of another node is not signed by this federation's authority")
    now = datetime.now(UTC)
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        raise CoterieError("a certificate of another node has expired or is not valid yet")
    if x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
        raise CoterieError("a certificate of another node is not one of a node")
    return certificate


def _issued(certificate: Any, authority: Any) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # verification raises several exception types; all mean failure
        return False
    return True
