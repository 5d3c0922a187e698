"""The cryptography of a secure sum: key agreement, derived keys, the mask generator and sealed shares.

X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), ChaCha20 (RFC 8439) and AES-256-GCM, all from the package cryptography.
Every key is used once, for one session, purpose, sender and receiver; nonces can therefore be constant.
"""

from collections.abc import Callable

import numpy as np

from coterie.errors import CoterieError
from coterie.privacy.secure_sum.fixed_point import Words
from coterie.privacy.secure_sum.messages import KEY_BYTES

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256, Hash
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as e:
    raise CoterieError('secure aggregation needs the extra "federation": pip install coterie[federation]') from e


def public_key(private: bytes) -> bytes:
    """Return the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_key(private: bytes, public: bytes, *context: str | int) -> bytes:
    """Return the key that two clients share for a purpose; raise CoterieError for a public key that hides nothing."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise CoterieError("a public key is not a point that can be used") from None
    return derived_key(secret, *context)


def derived_key(secret: bytes, *context: str | int) -> bytes:
    """Return a key for one purpose."""
    info = "\x1f".join(map(str, ("coterie secure sum", *context))).encode()
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def commitment(secret: bytes, *context: str | int) -> bytes:
    """Return a digest that verifies 32 random bytes without revealing them."""
    digest = Hash(SHA256())
    digest.update(derived_key(secret, "commitment", *context))
    return digest.finalize()


def mask_words(key: bytes, count: int) -> Words:
    """Return this many pseudo-random words, the stream of ChaCha20 under the key."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(4 * count))
    return np.frombuffer(stream, "<u4").astype(np.uint32, copy=False)


def seal_share(key: bytes, content: bytes, context: str) -> bytes:
    """Encrypt and authenticate; the key must not be used again."""
    return AESGCM(key).encrypt(bytes(12), content, context.encode())


def open_sealed(key: bytes, sealed: bytes, context: str) -> bytes:
    """Return the decrypted content; raise CoterieError if it was not sealed with this key and context."""
    try:
        return AESGCM(key).decrypt(bytes(12), sealed, context.encode())
    except InvalidTag:
        raise CoterieError("a sealed share was changed, or was sealed for a different client or sum") from None


def keyed_draw(key: bytes) -> Callable[[int], bytes]:
    """Return a generator of bytes that depend only on the key and on the earlier draws; for simulations."""
    stream = Cipher(ChaCha20(derived_key(key, "draw"), bytes(16)), mode=None).encryptor()
    return lambda count: stream.update(bytes(count))
