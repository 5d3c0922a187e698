"""The scale of float items and of targets: columns that training as they are would suffer from.

A column of vectors, or a channel of pictures and signals, is out of scale if its mean and standard deviation together
exceed 10 in size, or if none of its values exceeds 0.01.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.dataset import Dataset, Ints
from coterie.errors import CoterieError

_LARGE, _SMALL = 10.0, 0.01
_ROWS = 4096  # items whose sums are computed in one step
_Floats = NDArray[np.float64]


def standardised(data: Dataset, train: Ints) -> tuple[Dataset, str]:
    """Return the data with values out of scale standardised by `train`, and a note for the user.

    The columns of vectors are standardised one by one, if they are out of scale. All channels of pictures and signals
    are standardised if one of them is out of scale. If nothing is out of scale, the data are unchanged and the note is
    empty.
    """
    if not data.x.is_floating_point() or data.mean is not None:
        return data, ""
    mean, std, wrong = _moments(data.x, train)
    if not wrong.any():
        return data, ""
    if data.x.dim() == 2:
        mean, std = np.where(wrong, mean, 0.0), np.where(wrong, std, 1.0)
        what = f"{wrong.sum()} of {len(wrong)} columns"
    else:
        what = "the channels"
    largest = max(abs(mean) + std)
    sentence = (
        f"{what} of {data.name} have values far from 1 (up to about {largest:.3g}) and are standardised with mean and "
        "standard deviation of the training samples (--set normalize=none takes them as they are)"
    )
    return replace(data, mean=tuple(mean.tolist()), std=tuple(std.tolist())), sentence


def unscaled_items(data: Dataset, train: Ints) -> str:
    """Return a warning if items are out of scale and are used as they are; otherwise an empty string."""
    if not data.x.is_floating_point() or data.mean is not None or not _moments(data.x, train)[2].any():
        return ""
    return (
        f"items of {data.name} have values far from 1 and are used as they are; scale them before training, with the "
        "same numbers at every device"
    )


def unscaled_targets(data: Dataset, train: Ints) -> str:
    """Return a warning if targets of a regression are out of scale; otherwise an empty string."""
    if data.kind != "regression":
        return ""
    mean, std, wrong = _moments(data.y, train)
    if not wrong.any():
        return ""
    at = int(np.argmax(np.abs(mean) + std))
    return (
        f"targets of {data.name} have mean {mean[at]:.4g} and standard deviation {std[at]:.4g}, and models start near "
        "0; training may be slow or diverge: subtract the mean and divide by the deviation"
    )


def check_unit(data: Dataset) -> None:
    """Raise CoterieError if normalize = unit would leave items outside 0..1."""
    if data.table is not None:
        raise CoterieError(f"normalize = unit is for pictures, and {data.name} is a table; take standard or none")
    low, high = float(data.x.min()), float(data.x.max())
    if data.x.is_floating_point() and not (low >= 0 and high <= 1):
        raise CoterieError(
            f"normalize = unit divides bytes by 255, and items of {data.name} are floats from {low:.4g} to {high:.4g}; "
            "take standard, or scale them"
        )


def _moments(values: Tensor, rows: Ints) -> tuple[_Floats, _Floats, NDArray[np.bool_]]:
    """Return mean and standard deviation (1 for constants) of each column or channel, and whether it is out of scale.

    The sums are computed by NumPy in a fixed order, so that they do not depend on the number of threads.
    """
    array = values.numpy()
    axes = (0, *range(2, array.ndim))
    mean, square = np.zeros(array.shape[1]), np.zeros(array.shape[1])
    largest = np.zeros(array.shape[1])
    parts = [rows[a : a + _ROWS] for a in range(0, len(rows), _ROWS)]
    numbers = len(rows) * int(np.prod(array.shape[2:]))
    for part in parts:
        piece = array[part].astype(np.float64)
        mean += piece.sum(axis=axes) / numbers
        largest = np.maximum(largest, np.abs(piece).max(axis=axes))
    shape = (1, -1) + (1,) * (array.ndim - 2)
    for part in parts:
        square += np.square(array[part].astype(np.float64) - mean.reshape(shape)).sum(axis=axes) / numbers
    std = np.sqrt(square)
    wrong = (np.abs(mean) + std > _LARGE) | ((largest < _SMALL) & (largest > 0))
    return mean, np.where(std > 0, std, 1.0), wrong
