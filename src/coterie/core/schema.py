"""Schemas of payloads: the entries that may cross a link, with shape, type, range and meaning.

A method has one schema for each link. Declared bytes, the ledger's headings, the checks on arrival at cloud, edge and
device, and the table of payload entries are derived from it. An entry that the schema does not name cannot cross.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from coterie.core.tree import Predicate, value_bytes
from coterie.errors import CoterieError

Link = Literal["up", "down", "edge_up", "edge_down"]
LINKS: tuple[Link, ...] = get_args(Link)  # up: device to edge or cloud; edge_up: edge to cloud; the way back
Kind = Literal["model", "update", "prototype", "statistic", "label information", "prediction", "control"]

LARGEST_ENTRY = 1e9  # bound of a float entry without a range of its own; a model that still learns is far below

ROUNDING = 1e-6  # tolerance for a mean of entries at their bound


class NonFiniteError(CoterieError):
    """A payload holds NaN, infinity or values beyond all bounds: its sender's training diverged."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a payload.

    A length given as a word is chosen by the sender, is the same for all entries of the payload that use the word, and
    lies within the schema's `lengths`. The word "labels" is the number of classes that the sender has.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32
    kind: Kind = "model"
    part: str = "model"  # heading in the ledger
    low: float = -LARGEST_ENTRY
    high: float = LARGEST_ENTRY
    distinct: bool = False  # True if no value occurs twice
    nan: bool = False  # True if NaN may mark absent values
    optional: bool = False
    summable: bool = False  # True if a weighted sum over clients is meaningful
    counted: bool = False  # numbers of samples, together at most as many as the sender has
    shows_labels: bool = False  # True if its values show which classes the sender has

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Everything that the entry is: label information too if its values or its length show the sender's classes."""
        shows = self.shows_labels or "labels" in self.shape
        return (self.kind, "label information") if shows and self.kind != "label information" else (self.kind,)

    def size(self, lengths: Mapping[str, int]) -> int:
        """Return the bytes on the wire, with these lengths for its words; booleans are one bit each."""
        count = math.prod(lengths[n] if isinstance(n, str) else n for n in self.shape)
        return value_bytes(count, self.dtype)


@dataclass(frozen=True)
class Schema:
    entries: Mapping[str, Entry]
    lengths: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # smallest and largest length by word
    may_be_empty: bool = False  # True if an empty payload is allowed

    def __or__(self, other: "Schema") -> "Schema":
        """Return a schema with the entries of both."""
        return Schema(
            {**self.entries, **other.entries},
            {**self.lengths, **other.lengths},
            self.may_be_empty and other.may_be_empty,
        )

    def optional(self) -> "Schema":
        """Return a schema with these entries, none of them required."""
        return replace(self, entries={k: replace(e, optional=True) for k, e in self.entries.items()}, may_be_empty=True)

    def keep(self, chosen: Predicate) -> "Schema":
        """Return the schema of the entries for which `chosen` is true."""
        return replace(self, entries={k: e for k, e in self.entries.items() if chosen(k)})

    def nbytes(self, **lengths: int) -> int:
        """Return the declared bytes of a payload with all entries; a word without a length has its largest."""
        most = {word: high for word, (_, high) in self.lengths.items()} | lengths
        return sum(e.size(most) for e in self.entries.values())

    def parts(self, tree: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the bytes of a payload by heading of the ledger."""
        total: dict[str, int] = {}
        for name, v in tree.items():
            if name not in self.entries:
                raise CoterieError(f"{name[:80]!r} may not be sent: the method's schema does not declare it")
            part = self.entries[name].part
            total[part] = total.get(part, 0) + value_bytes(v.numel(), v.dtype)
        return total

    def check(self, tree: Mapping[str, Tensor], what: str, samples: int | None = None) -> None:
        """Raise CoterieError unless the payload is exactly as declared.

        `samples` is the sender's number of samples, if it is known.
        """
        if not tree and self.may_be_empty:
            return
        for name, e in self.entries.items():
            if name not in tree and not e.optional:
                raise CoterieError(f"{what} lacks {name}")
        sizes: dict[str, int] = {}
        for name, v in tree.items():
            entry = self.entries.get(name)
            if entry is None:
                raise CoterieError(f"{what} has an entry {name[:80]!r} that is not declared")
            if not isinstance(v, Tensor):
                raise CoterieError(f"{what} has {name} that is not a tensor")
            if v.dtype != entry.dtype:
                raise CoterieError(f"{what} has {name} of type {_word(v.dtype)}, not {_word(entry.dtype)}")
            self._check_shape(name, entry, v, sizes, what)
        for name, v in tree.items():  # checked last, so that NonFiniteError means that all other checks passed
            _check_values(name, self.entries[name], v, what)
            if samples is not None and self.entries[name].counted and (n := int(v.sum(dtype=torch.int64))) > samples:
                raise CoterieError(f"{what} counts {n} samples in {name}, its sender has {samples}")

    def _check_shape(self, name: str, entry: Entry, v: Tensor, found: dict[str, int], what: str) -> None:
        if v.ndim == len(entry.shape):
            for n, declared in zip(v.shape, entry.shape, strict=True):
                if isinstance(declared, str):
                    low, high = self.lengths[declared]
                    if not low <= n <= high or found.setdefault(declared, n) != n:
                        break
                elif n != declared:
                    break
            else:
                return
        want = ", ".join(map(str, entry.shape))
        raise CoterieError(f"{what} has {name} of shape {list(v.shape)}, not [{want}]")


def _check_values(name: str, entry: Entry, v: Tensor, what: str) -> None:
    if not v.numel() or v.dtype == torch.bool:
        return
    if entry.nan:
        v = v[~v.isnan()]
        if not v.numel():
            return
    low, high = (float(x) for x in torch.aminmax(v))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteError(f"{what} has NaN or infinity in {name}")
    if v.is_floating_point() and max(-low, high) > LARGEST_ENTRY * (1 + ROUNDING):
        raise NonFiniteError(f"{what} has {max(-low, high):g} in {name}, larger than anything that still learns")
    slack = ROUNDING * abs(entry.high) if v.is_floating_point() else 0.0
    if low < entry.low - slack * (entry.low < 0) or high > entry.high + slack:
        wrong = low if low < entry.low else high
        raise CoterieError(f"{what} has {wrong:g} in {name}, outside {entry.low:g} to {entry.high:g}")
    if entry.distinct and len(torch.unique(v)) < v.numel():
        raise CoterieError(f"{what} has the same value twice in {name}")


def like(tree: Mapping[str, Tensor], kind: Kind = "model", part: str = "model", **more: bool) -> dict[str, Entry]:
    """Return entries with the names, shapes and types of a tree; a model's values may be summed over clients."""
    summable = kind in ("model", "update")
    return {
        k: Entry(
            tuple(v.shape),
            v.dtype,
            kind,
            part,
            low=0 if kind == "model" and k.rpartition(".")[2] == "running_var" else -LARGEST_ENTRY,
            summable=summable and v.is_floating_point(),
            **more,
        )
        for k, v in tree.items()
    }


def class_ids(length: int | str, classes: int, part: str = "model", distinct: bool = True) -> Entry:
    """Return the entry for ids of classes, 0 to classes - 1, as 32-bit integers."""
    return Entry((length,), torch.int32, "label information", part, 0, classes - 1, distinct)


def counts(length: int | str, part: str = "model") -> Entry:
    """Return the entry for numbers of samples, as 32-bit integers."""
    return Entry((length,), torch.int32, "label information", part, 0, 2**31 - 1, counted=True)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
