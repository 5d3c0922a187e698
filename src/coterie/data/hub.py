"""Data sets of the Hugging Face hub through `datasets`; code that a data set brings along is never run."""

from typing import Any

import numpy as np

from coterie.data.arrays import Array, RawData
from coterie.errors import CoterieError

_ITEMS = ("image", "img", "pixel_values", "x", "text", "sentence", "content", "features")
_LABELS = ("label", "labels", "fine_label", "y", "target", "class")
_CLIENTS = ("client", "client_id", "user", "user_id", "writer_id", "domain")


def read_hub(name: str) -> RawData:
    """`owner/name` or `owner/name:configuration`."""
    try:
        import datasets
    except ImportError:
        raise CoterieError(f"hub:{name} needs the extra `hub`; install it with pip install 'coterie[hub]'") from None
    repository, _, configuration = name.partition(":")
    try:
        found = datasets.load_dataset(repository, configuration or None)
    except Exception as e:  # network, unknown names, refused scripts: the hub raises many kinds
        reason = (str(e).splitlines() or [type(e).__name__])[0].rstrip(".")
        raise CoterieError(f"hub:{name} could not be loaded: {reason}") from e
    if "train" not in found:
        raise CoterieError(f"hub:{name} has no part called train; it has {', '.join(found)}")
    train = found["train"]
    test = next((found[p] for p in ("test", "validation", "valid") if p in found), None)
    item, label = _column(name, train, _ITEMS, "items"), _column(name, train, _LABELS, "labels")
    client = next((c for c in _CLIENTS if c in train.column_names), None)
    parts = [(_stack(p[item]), np.asarray(p[label]), p) if p is not None else None for p in (train, test)]
    (x, y, _), other = parts[0] or (None, None, None), parts[1]
    names = getattr(train.features.get(label), "names", None)
    owner = [None if client is None or p is None else np.asarray(p[2][client]) for p in parts]
    return RawData(x, y, other and other[0], other and other[1], names, *owner)  # type: ignore[arg-type]


def _column(name: str, part: Any, wanted: tuple[str, ...], what: str) -> str:
    for column in wanted:
        if column in part.column_names:
            return column
    raise CoterieError(
        f"hub:{name} has no column for {what} ({', '.join(wanted)}); it has {', '.join(part.column_names)}"
    )


def _stack(values: Any) -> Array:
    """Pictures, texts or lists of numbers as one array."""
    values = list(values)
    if values and isinstance(values[0], str):
        return np.array(values, dtype=str)
    arrays = [np.asarray(v) for v in values]
    if len({a.shape for a in arrays}) > 1:
        if all(a.ndim in (2, 3) for a in arrays) and len({a.shape[:2] for a in arrays}) == 1:  # grey among coloured
            arrays = [np.repeat(a[:, :, None], 3, axis=2) if a.ndim == 2 else a[:, :, :3] for a in arrays]
        else:
            raise CoterieError("items of a data set must all have one shape")
    return np.stack(arrays)
