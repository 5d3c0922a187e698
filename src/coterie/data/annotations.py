"""Optional columns of a data set: a given split, groups that must stay together, and client names."""

from collections.abc import Sequence
from numbers import Integral

import numpy as np

from coterie.data.dataset import Array, Ints
from coterie.errors import CoterieError

_SPLIT_CODES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}
PART_WORDS = ("training", "validation", "test")


def split_codes(name: str, split: Array, n: int) -> Ints:
    """Return 0 (train), 1 (validation) or 2 (test) for each of n items; `split` holds these numbers or words."""
    if split.shape != (n,):
        raise CoterieError(f"{name} has {n} items but a split of shape {split.shape}; it must be one value per item")
    if split.dtype.kind in "US":
        words, position = np.unique(np.char.lower(np.char.strip(split.astype(str))), return_inverse=True)
        unknown = [str(w) for w in words if str(w) not in _SPLIT_CODES]
        if unknown:
            raise CoterieError(f'the split of {name} says "{unknown[0]}"; the words for it are train, val and test')
        codes: Ints = np.array([_SPLIT_CODES[str(w)] for w in words], np.int64)[position]
        return codes
    if split.dtype.kind not in "bui" or not np.isin(split, (0, 1, 2)).all():
        raise CoterieError(f"the split of {name} must be train, val and test, or 0, 1 and 2 for them")
    numbers: Ints = split.astype(np.int64)
    return numbers


def group_codes(name: str, group: Array, n: int) -> Ints:
    """Return the group number of each of n items; groups are numbered in sorted order of their names."""
    if group.shape != (n,):
        raise CoterieError(f"{name} has {n} items but groups of shape {group.shape}; it must be one value per item")
    codes: Ints = np.unique(group, return_inverse=True)[1].astype(np.int64)
    return codes


def client_number(names: Sequence[str], client: int | str) -> int:
    """Return the number of a client that is given by number or by name."""
    if isinstance(client, str):
        if client in names:
            return names.index(client)
        if not client.isdecimal() or names != tuple(map(str, range(len(names)))):
            some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise CoterieError(f'unknown client "{client}"; the clients are named {some}')
        client = int(client)
    if isinstance(client, bool) or not isinstance(client, Integral):
        raise CoterieError(f"client = {client!r} is invalid: it must be a number or a name")
    if not 0 <= client < len(names):
        raise CoterieError(f"unknown client {client}; clients are numbered 0 to {len(names) - 1}")
    return int(client)
