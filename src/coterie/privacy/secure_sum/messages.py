"""The messages of a secure sum, in the order in which they are sent. Keys, shares and words are tensors.

| step | from the server | from a client |
|---|---|---|
| keys | SumTerms | PublicKeys |
| shares | NeighbourKeys | SealedShares |
| masked | IncomingShares | MaskedWords |
| unmask | Survivors | RevealedShares |
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.states import register
from coterie.core.tree import value_bytes
from coterie.errors import CoterieError
from coterie.privacy.secure_sum.fixed_point import Words
from coterie.privacy.secure_sum.shamir import SHARE_BYTES

SUM_STEPS = ("keys", "shares", "masked", "unmask")
KEY_BYTES = 32
SEALED_BYTES = 2 * SHARE_BYTES + 16  # two shares, and the tag that sealing adds
SIGNATURE_BYTES = 64  # a signature made with the key of a node's certificate


@register
@dataclass(frozen=True)
class SumTerms:
    """The terms that are the same for all clients of one sum."""

    session: str  # names this sum; every key is bound to it
    least: int  # the fewest clients that a sum may have
    share: float  # more than this share of the holders of a client's shares must answer in the last step

    def threshold(self, holders: int) -> int:
        """Return the number of shares that recover a client's secret, if it has this many holders."""
        return max(self.least, math.floor(self.share * holders) + 1)


@register
@dataclass(frozen=True)
class PublicKeys:
    """A client's keys for one sum."""

    client: int
    mask: Tensor  # uint8 [32], for the masks of pairs
    cipher: Tensor  # uint8 [32], for sealed shares
    committed: Tensor  # uint8 [32], by which the server checks the seed of the client's own mask; empty to others
    signature: Tensor  # uint8 [any], of `signed_text`; empty in a simulation

    def signed_text(self, session: str) -> bytes:
        """Return the bytes that the signature covers."""
        keys = to_bytes(self.mask) + to_bytes(self.cipher)
        return f"coterie secure sum keys\x1f{session}\x1f{self.client}\x1f".encode() + keys


@register
@dataclass(frozen=True)
class NeighbourKeys:
    """The clients of a sum, and the keys of a client's neighbours."""

    members: Tensor  # bool [clients], true for those whose keys arrived
    keys: tuple[PublicKeys, ...]


@register
@dataclass(frozen=True)
class SealedShares:
    """A client's secrets for its neighbours: one row each, in the order of their numbers."""

    client: int
    sealed: Tensor  # uint8 [neighbours, SEALED_BYTES]


@register
@dataclass(frozen=True)
class IncomingShares:
    """The shares that a client's neighbours have sealed for it."""

    senders: tuple[int, ...]
    sealed: Tensor  # uint8 [senders, SEALED_BYTES]


@register
@dataclass(frozen=True)
class MaskedWords:
    """A client's numbers with all its masks."""

    client: int
    words: Tensor  # int32 [count], the bits of numbers modulo 2^32


@register
@dataclass(frozen=True)
class Survivors:
    """A client's neighbours whose masked numbers are part of the sum."""

    clients: tuple[int, ...]


@register
@dataclass(frozen=True)
class RevealedShares:
    """Shares of its own secrets and of its neighbours' secrets that a client holds, in the order of client numbers.

    If the masked numbers of a client are part of the sum, the share is one of the seed of its own mask. Otherwise it is
    one of its mask key. Both are never revealed for the same client.
    """

    client: int
    shares: Tensor  # uint8 [1 + senders, SHARE_BYTES]


@dataclass(frozen=True)
class SummedWords:
    """The result: the sum over some clients, and the clients whose revealed shares were wrong."""

    words: Words
    clients: tuple[int, ...]
    liars: tuple[int, ...] = ()


def to_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor of bytes."""
    return tensor.contiguous().numpy().tobytes()


def rows_tensor(rows: Iterable[bytes], width: int) -> Tensor:
    """Return rows of bytes as a tensor [rows, width]."""
    return to_tensor(b"".join(rows)).view(-1, width)


def words_tensor(words: Words) -> Tensor:
    """Return words as a tensor of the same bits."""
    return torch.from_numpy(words.view(np.int32))


def tensor_words(tensor: Tensor) -> Words:
    """Return the words of a tensor that `words_tensor` made."""
    return tensor.contiguous().numpy().view(np.uint32)


def check_bytes(tensor: Tensor, shape: Sequence[int], what: str) -> None:
    """Raise CoterieError unless a tensor holds bytes in this shape."""
    if tensor.dtype != torch.uint8 or list(tensor.shape) != list(shape):
        raise CoterieError(f"{what} must be bytes of shape {list(shape)}")


def check_keys(keys: PublicKeys) -> None:
    """Raise CoterieError unless all keys have their lengths."""
    for name, value in (("mask key", keys.mask), ("cipher key", keys.cipher)):
        check_bytes(value, [32], f"the {name} of client {keys.client}")
    if keys.signature.dtype != torch.uint8 or keys.signature.ndim != 1 or keys.client < 0:
        raise CoterieError(f"the keys of client {keys.client} are not well formed")


def tensor_bytes(message: Any) -> int:
    """Return the bytes of the tensors in a message."""
    if isinstance(message, Tensor):
        return value_bytes(message.numel(), message.dtype)
    if isinstance(message, tuple | list):
        return sum(map(tensor_bytes, message))
    if isinstance(message, dict):
        return sum(map(tensor_bytes, message.values()))
    if hasattr(message, "__dataclass_fields__"):
        return sum(tensor_bytes(getattr(message, f.name)) for f in fields(message))
    return 0
