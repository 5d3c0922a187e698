"""Arrays that stay on disk, because they may be larger than memory."""

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import CoterieError

MAPPED_BYTES = 2**28  # size from which an array stays on disk
_ROWS = 4096  # rows that are copied in one step


def is_large(shape: tuple[int, ...], item_bytes: int) -> bool:
    """True if an array of this shape stays on disk."""
    return int(np.prod(shape, dtype=np.int64)) * item_bytes >= MAPPED_BYTES


def empty_on_disk(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array in a file without a name in the data folder, which disappears with the array."""
    from coterie.data.catalogue import data_dir  # imports the readers, which need this module

    try:
        data_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir()) as f:  # the mapping keeps the file
            return np.memmap(f, dtype, "w+", 0, shape)
    except OSError as e:
        size = np.prod(shape, dtype=np.int64) * np.dtype(dtype).itemsize / 1e9
        raise CoterieError(
            f"data of {size:.1f} GB cannot be kept in {data_dir()} ({e.strerror or e}); COTERIE_DATA names a different "
            "folder"
        ) from None


def empty_table(rows: int, columns: int) -> NDArray[np.float64]:
    """Return an array [rows, columns] whose columns are contiguous, on disk if it is large."""
    shape = (columns, rows)
    return (empty_on_disk(shape, np.float64) if is_large(shape, 8) else np.empty(shape)).T


def copy_table(x: Tensor) -> Tensor:
    """Return a copy of a table's rows [n, columns], on disk if they are large."""
    if not is_large(tuple(x.shape), x.element_size()):
        return x.clone()
    out = torch.from_numpy(empty_table(*x.shape))
    for i in range(x.shape[1]):
        out[:, i] = x[:, i]
    return out


def contiguous_parts(x: Tensor) -> Iterator[Tensor]:
    """Yield x in contiguous parts, one after the other if it is not contiguous as a whole."""
    for part in [x] if x.is_contiguous() else torch.split(x, _ROWS):
        yield part.contiguous()


def joined(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Return both arrays as one; two neighbouring parts of an array on disk are not copied."""
    whole = first.base
    neighbours = isinstance(first, np.memmap) and isinstance(whole, np.ndarray) and whole is second.base
    if neighbours and whole.shape == (len(first) + len(second), *first.shape[1:]):  # type: ignore[union-attr]
        return whole  # type: ignore[return-value]
    return np.concatenate([first, second])
