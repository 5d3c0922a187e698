"""Data sets of the Hugging Face hub, read through `datasets`; code that comes with a data set is never run."""

from typing import Any

import numpy as np

from coterie.data.arrays import RawData
from coterie.data.dataset import Array
from coterie.errors import CoterieError

_ITEMS = ("image", "img", "pixel_values", "x", "text", "sentence", "content", "features")
_LABELS = ("label", "labels", "fine_label", "y", "target", "class")
_CLIENTS = ("client", "client_id", "user", "user_id", "writer_id", "domain")


def read_hub(name: str) -> RawData:
    """Read the data set `owner/name` or `owner/name:configuration`."""
    try:
        import datasets
    except ImportError:
        raise CoterieError(f"hub:{name} needs the extra `hub`; install it with pip install 'coterie[hub]'") from None
    repository, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(repository, configuration or None)
    except Exception as e:  # network, unknown names, scripts: the hub raises many types
        reason = (str(e).splitlines() or [type(e).__name__])[0].rstrip(".")
        raise CoterieError(f"hub:{name} could not be loaded: {reason}") from e
    if "train" not in splits:
        raise CoterieError(f"hub:{name} has no part called train; it has {', '.join(splits)}")
    train = splits["train"]
    test = next((splits[p] for p in ("test", "validation", "valid") if p in splits), None)
    item, label = _column(name, train, _ITEMS, "items"), _column(name, train, _LABELS, "labels")
    client = next((c for c in _CLIENTS if c in train.column_names), None)
    names = getattr(train.features.get(label), "names", None)
    raw = RawData(_stack(train[item]), np.asarray(train[label]), classes=names)
    if test is not None:
        raw = raw._replace(x_test=_stack(test[item]), y_test=np.asarray(test[label]))
    if client is not None:
        raw = raw._replace(client=np.asarray(train[client]))
        raw = raw if test is None else raw._replace(client_test=np.asarray(test[client]))
    return raw


def _column(name: str, part: Any, candidates: tuple[str, ...], role: str) -> str:
    for column in candidates:
        if column in part.column_names:
            return column
    raise CoterieError(
        f"hub:{name} has no column for {role} ({', '.join(candidates)}); it has {', '.join(part.column_names)}"
    )


def _stack(values: Any) -> Array:
    """Stack pictures, texts or lists of numbers into one array."""
    values = list(values)
    if values and isinstance(values[0], str):
        return np.array(values, dtype=str)
    arrays = [np.asarray(v) for v in values]
    if len({a.shape for a in arrays}) > 1:
        if all(a.ndim in (2, 3) for a in arrays) and len({a.shape[:2] for a in arrays}) == 1:  # grey and coloured
            arrays = [np.repeat(a[:, :, None], 3, axis=2) if a.ndim == 2 else a[:, :, :3] for a in arrays]
        else:
            raise CoterieError("all items of a data set must have the same shape")
    return np.stack(arrays)
