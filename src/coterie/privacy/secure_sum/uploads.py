"""Uploads as words of a secure sum: the weighted change of every value, the weight, and whether a value was clipped."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.core.method import Method, Upload
from coterie.core.schema import Entry, NonFiniteError
from coterie.core.tree import Tree
from coterie.privacy.secure_sum.fixed_point import FixedPoint, Words

_WEIGHT, _CLIPPED, _HEAD = 0, 1, 2  # the first words: the weight, 1 if a value was clipped; then all values


@dataclass(frozen=True)
class SummedUpload:
    """The decoded sum over some clients."""

    tree: Tree  # their weighted mean
    weight: int  # the sum of their weights
    clipped: int  # number of clients with a clipped value


@dataclass(frozen=True)
class UploadWords:
    """The encoding of uploads as words, which is the same at every client and at the server.

    A change is relative to the download; an entry that is not in the download counts as a change from zero.
    """

    entries: Mapping[str, Entry]
    clip: float  # bound of the change of a single value
    clients: int  # the most clients of a sum
    largest: int  # the weight that counts as one; a larger weight counts as this one

    @staticmethod
    def of(method: Method, clip: float, largest: int) -> "UploadWords":
        """Return the words of a method's uploads."""
        entries = method.schema("up").entries
        return UploadWords(dict(entries), clip, len(method.ctx.clients), largest)

    @property
    def points(self) -> FixedPoint:
        return FixedPoint(self.clip, self.clients)

    @property
    def count(self) -> int:
        """The number of words of an upload."""
        return _HEAD + sum(self._size(e) for e in self.entries.values())

    @staticmethod
    def _size(entry: Entry) -> int:
        return int(np.prod([int(n) for n in entry.shape], dtype=np.int64))

    def encode(self, sent: Tree, tree: Tree, weight: int) -> Words:
        """Return the words of an upload; raise NonFiniteError if a value is NaN or infinite."""
        words, factor, points = np.zeros(self.count, np.uint32), min(weight, self.largest) / self.largest, self.points
        words[_WEIGHT], at = min(weight, self.largest), _HEAD
        for name, entry in self.entries.items():
            change = _doubles(tree[name]) - (_doubles(sent[name]) if name in sent else 0.0)
            if not np.isfinite(change).all():
                raise NonFiniteError(f"the upload has NaN or infinity in {name}")
            bounded = np.clip(change, -self.clip, self.clip)
            words[_CLIPPED] |= np.uint32((bounded != change).any())
            words[at : at + self._size(entry)] = points.encode(bounded * factor)
            at += self._size(entry)
        return words

    def decode(self, sent: Tree, words: Words) -> SummedUpload:
        """Return the weighted mean of the uploads whose words were added."""
        weight, at = int(words[_WEIGHT]), _HEAD
        changes, tree = self.points.decode(words) * (self.largest / max(1, weight)), dict[str, Tensor]()
        for name, entry in self.entries.items():
            change = torch.from_numpy(changes[at : at + self._size(entry)]).view([int(n) for n in entry.shape])
            value = change + (sent[name].double() if name in sent else 0.0)
            tree[name] = value.clamp(entry.low, entry.high).to(entry.dtype)
            at += self._size(entry)
        return SummedUpload(tree, weight, int(words[_CLIPPED]))


def weight_of(method: Method, upload: Upload) -> int:
    """Return the weight of an upload in a mean, as a whole number."""
    weights = method.weights([upload])
    return 1 if weights is None else int(weights[0])


def _doubles(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return tensor.detach().double().reshape(-1).numpy()
