"""What data bring of their own beside items and labels: a split, groups that must stay together, names of clients."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError

Ints = NDArray[np.int64]
_SPLIT_CODES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}
PART_WORDS = ("training", "validation", "test")


def split_codes(name: str, split: NDArray[Any], n: int) -> Ints:
    """0 train, 1 validation, 2 test of each item, from these numbers or from words."""
    if split.shape != (n,):
        raise CoterieError(f"{name} has {n} items but a split of shape {split.shape}; it must be one value per item")
    if split.dtype.kind in "US":
        words = np.char.lower(np.char.strip(split.astype(str)))
        found, at = np.unique(words, return_inverse=True)
        unknown = [str(w) for w in found if str(w) not in _SPLIT_CODES]
        if unknown:
            raise CoterieError(f'the split of {name} says "{unknown[0]}"; an item is in train, val or test')
        codes: Ints = np.array([_SPLIT_CODES[str(w)] for w in found], np.int64)[at]
        return codes
    if split.dtype.kind not in "bui" or not np.isin(split, (0, 1, 2)).all():
        raise CoterieError(f"the split of {name} must be train, val and test, or 0, 1 and 2 for them")
    numbers: Ints = split.astype(np.int64)
    return numbers


def group_codes(name: str, group: NDArray[Any], n: int) -> Ints:
    """A number for each group, in sorted order of what they are called."""
    if group.shape != (n,):
        raise CoterieError(f"{name} has {n} items but groups of shape {group.shape}; it must be one value per item")
    codes: Ints = np.unique(group, return_inverse=True)[1].astype(np.int64)
    return codes


def client_number(names: Sequence[str], client: int | str) -> int:
    """The number of a client that is given by number or name."""
    if isinstance(client, str):
        if client in names:
            return names.index(client)
        if not client.isdecimal() or names != tuple(map(str, range(len(names)))):
            some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise CoterieError(f'there is no client "{client}"; their names are {some}')
        client = int(client)
    if isinstance(client, bool) or not 0 <= client < len(names):
        raise CoterieError(f"there is no client {client}; they are numbered 0 to {len(names) - 1}")
    return int(client)
