"""Turn arrays or torch data sets of a user into a Dataset: one form for shapes and labels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.data.annotations import group_codes, split_codes
from coterie.data.dataset import Array, Dataset
from coterie.data.on_disk import empty_on_disk, is_large, joined
from coterie.data.table import TableEncoding
from coterie.data.target_types import read_targets, target_notes
from coterie.data.text import LENGTH, VOCABULARY, tokens
from coterie.errors import CoterieError, unknown


class RawData(NamedTuple):
    """The arrays that a reader returns, before shapes and labels are checked."""

    x: Array
    y: Array
    x_test: Array | None = None
    y_test: Array | None = None
    classes: Sequence[str] | None = None
    client: Array | None = None
    client_test: Array | None = None
    task: str | None = None  # None: inferred from the targets
    split: Array | None = None  # one value per item of x; x then holds the test items too
    group: Array | None = None
    group_test: Array | None = None
    items: str | None = None  # one of ITEM_KINDS; None: inferred from type and shape


_ROWS = 4096  # items that are read in one step
_LARGEST_TOKEN = 10**8  # larger whole numbers are not tokens of a vocabulary
ITEM_KINDS = ("pictures", "signals", "numbers", "tokens")


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    name: str = "arrays",
    classes: Sequence[str] | None = None,
    client: Any = None,
    client_test: Any = None,
    task: str | None = None,
    split: Any = None,
    group: Any = None,
    group_test: Any = None,
    items: str | None = None,
) -> Dataset:
    """Make a Dataset from arrays.

    Items x are pictures [n, H, W(, C)] or [n, C, H, W], signals [n, T, C], vectors [n, d], token ids [n, L], texts [n],
    or a dictionary of arrays of whole numbers of one shape, such as token ids and mask, which a model takes as several
    arguments in this order. `items` names their kind (pictures, signals, numbers or tokens), which is otherwise
    inferred from type and shape. Targets y are classes [n], numbers [n] or [n, k], labels of 0 and 1 [n, k], or time
    and event [n, 2]; `task` names their kind, which is otherwise inferred from the values.
    """
    if x is None or y is None:
        raise CoterieError(f"{name} needs both x and y")
    columns = {"client": client, "client_test": client_test, "split": split, "group": group, "group_test": group_test}
    if isinstance(x, Mapping):
        x, x_test, items = _inputs(x, name), None if x_test is None else _inputs(x_test, name), items or "tokens"
    given = {"x": x, "y": y, "x_test": x_test, "y_test": y_test, **columns}
    arrays = {k: _plain(v, f"{k} of {name}") for k, v in given.items() if v is not None}
    return make_dataset(name, RawData(**arrays, classes=classes, task=task, items=items))


def _inputs(given: Any, name: str) -> Array:
    """Return the inputs of a dictionary, such as token ids and mask, as items [inputs, ...] in its order."""
    parts = [np.asarray(v) for v in given.values()] if isinstance(given, Mapping) else []
    if not parts or any(p.shape != parts[0].shape or p.dtype.kind not in "bui" for p in parts):
        raise CoterieError(f"a dictionary of inputs of {name} must hold arrays of whole numbers of one shape")
    return np.stack(parts, 1).astype(np.int64)


def from_torch(train: Any, test: Any = None, *, name: str = "torch", classes: Sequence[str] | None = None) -> Dataset:
    """Make a Dataset from a map-style torch data set of (x, y) and, if given, one for the official test part.

    Every item is read once. If all items together are large, they go to a file on disk one after the other, and the
    items of a client are read from there when it trains.
    """
    sources = [train] if test is None else [train, test]
    large = _on_disk(sources, name)
    x, y = _read_items(train, name, None if large is None else large[: len(train)])
    x_test, y_test = (
        (None, None) if test is None else _read_items(test, name, None if large is None else large[len(train) :])
    )
    return make_dataset(name, RawData(x, y, x_test, y_test, classes or getattr(train, "classes", None)))


def make_dataset(
    name: str, raw: RawData, task: str | None = None, table: TableEncoding | None = None, notes: Sequence[str] = ()
) -> Dataset:
    """Check raw arrays and bring them into the form of a Dataset; `task` is used if the arrays do not name theirs.

    With `table`, x holds the rows of a table with these columns, and `notes` say how it was read.
    """
    if (raw.x_test is None) != (raw.y_test is None):
        raise CoterieError(f"{name} has only one of x_test and y_test")
    for x, y, part_name in ((raw.x, raw.y, "training"), (raw.x_test, raw.y_test, "test")):
        if x is not None and y is not None and (x.ndim == 0 or y.ndim == 0 or len(x) != len(y)):
            raise CoterieError(f"{name} has {_count(x)} items but {_count(y)} labels in its {part_name} part")
    test = raw.x_test is not None and raw.y_test is not None and len(raw.y_test) > 0
    n_train = len(raw.x)
    if test and raw.x_test is not None and raw.x_test.shape[1:] != raw.x.shape[1:]:
        raise CoterieError(
            f"training and test items of {name} differ in shape: {raw.x.shape[1:]} and {raw.x_test.shape[1:]}"
        )
    x = raw.x if not test or raw.x_test is None else joined(raw.x, raw.x_test)
    if n_train == 0:
        raise CoterieError(f"{name} has no training samples")
    if raw.y.ndim > 2 and raw.y[0].size > 1:
        raise CoterieError(
            f"labels of {name} have shape {raw.y.shape[1:]} each, as in segmentation; Coterie takes one label (or a "
            "row of numbers) per item, such as classification"
        )
    y = raw.y.reshape(n_train, -1)
    if test and raw.y_test is not None:
        more = raw.y_test.reshape(len(raw.y_test), -1)
        if more.shape[1] != y.shape[1]:
            raise CoterieError(
                f"training and test labels of {name} differ in shape: {y.shape[1:]} and {more.shape[1:]}"
            )
        y = np.concatenate([y, more])
    kind, labels, classes = read_targets(name, y, raw.classes, raw.task or task)
    items = convert_items(name, x, raw.items) if table is None else torch.from_numpy(x)
    inferred = raw.task is None and task is None and raw.classes is None
    is_test = torch.arange(len(labels)) >= n_train
    part = _part(name, raw, n_train)
    is_test = is_test if part is None else part == 2
    mean, std = _channel_moments(items, ~is_test)
    vocab = VOCABULARY if x.dtype.kind == "U" else int(items.max()) + 1 if items.dtype == torch.int64 else None
    owner, names = _owner(name, raw, n_train)
    data = Dataset(name, items, labels, classes, is_test, owner, mean, std, vocab, kind, table=table)
    about_targets = target_notes(name, y, kind) if inferred else ()
    return replace(
        data, part=part, group=_group(name, raw, n_train), client_names=names,
        notes=_notes(name, x, items, raw) if table is None else tuple(notes),
        target_notes=about_targets,
    )  # fmt: skip


def with_partition(data: Dataset, partition: Any) -> Dataset:
    """Return the data whose clients are given by a list of arrays of sample numbers, one for each client.

    `partition` may also be a function that gets all targets and returns such a list. Samples in no array are left out.
    """
    try:
        parts = [np.asarray(p) for p in (partition(data.y.numpy()) if callable(partition) else partition)]
    except CoterieError:
        raise
    except Exception as e:  # a user's function may raise anything
        raise CoterieError(f"partition must be a list of arrays of sample numbers: {type(e).__name__}: {e}") from e
    owner = np.full(len(data), -1, np.int64)
    for client, index in enumerate(parts):
        if index.ndim != 1 or index.dtype.kind not in "ui" or not len(index):
            raise CoterieError(f"partition: client {client} must have an array of sample numbers that is not empty")
        if index.min() < 0 or index.max() >= len(data):
            raise CoterieError(f"partition: client {client} has samples from {index.min()} to {index.max()}, and the "
                               f"data have {len(data)}")  # fmt: skip
        if (owner[index] >= 0).any() or len(np.unique(index)) < len(index):
            raise CoterieError(f"partition: a sample of client {client} is named twice")
        owner[index] = client
    if not parts:
        raise CoterieError("partition names no clients")
    kept = torch.from_numpy(np.flatnonzero(owner >= 0))
    names = tuple(map(str, range(len(parts))))
    data = data if len(kept) == len(data) else data.take(kept)
    return replace(data, owner=torch.from_numpy(owner)[kept], client_names=names)


def _notes(name: str, x: Array, items: Tensor, raw: RawData) -> tuple[str, ...]:
    """Return a note for each choice about the items that may be wrong; none if their kind is named."""
    if raw.items is not None:
        return ()
    if items.dtype == torch.int64 and x.dtype.kind != "U":
        return (
            f"items of {name} are whole numbers of shape {tuple(x.shape[1:])} and are taken for token ids; give floats "
            'or items="numbers" if they are numbers, and items="tokens" if they are token ids',
        )
    if x.ndim == 3 and items.ndim == 4 and x.dtype != np.uint8 and x.shape[1] != x.shape[2]:
        return (
            f"items of {name} of shape {tuple(x.shape[1:])} are taken for grey pictures; give "
            'items="signals" if they are signals, and items="pictures" otherwise',
        )
    return ()


def _channel_moments(x: Tensor, train: Tensor) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return mean and standard deviation of x/255 per channel over the training part; None if x is not bytes.

    Both are exact: they are computed from the counts of the 256 values.
    """
    if x.dtype != torch.uint8:
        return None, None
    value = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(x.shape[1]):
        share = torch.zeros(256, dtype=torch.float64)
        for rows in torch.split(train.nonzero().flatten(), _ROWS):  # in parts: x may be larger than memory
            share += torch.bincount(x[rows, channel].reshape(-1), minlength=256)
        share /= share.sum()
        m = float(share @ value)
        s = float((share @ (value - m).square()).sqrt())
        mean.append(m)
        std.append(s if s > 0 else 1.0)
    return tuple(mean), tuple(std)


def convert_items(name: str, x: Any, kind: str | None = None) -> Tensor:
    """Bring raw items into the form of a new data set, which type and shape decide unless `kind` names it.

    Channels come first. Bytes stay bytes, half and double floats become float32, texts become token ids. Other whole
    numbers become bytes if they are pictures with values from 0 to 255, token ids if they are a matrix, and floats
    otherwise.
    """
    if kind is not None and kind not in ITEM_KINDS:
        raise unknown("kind of items", kind, ITEM_KINDS)
    x = _plain(x, f"items of {name}")
    if x.size == 0:
        raise CoterieError(f"items of {name} are empty: one has shape {x.shape[1:]}")
    if x.dtype.kind == "U":
        if x.size != len(x):
            raise CoterieError(f"items of {name} must be one text each, but have shape {x.shape[1:]}")
        return torch.from_numpy(tokens(x.reshape(len(x))))
    if x.dtype.kind not in "buif":
        raise CoterieError(f"items of {name} are of type {x.dtype}; numbers or texts are needed")
    if x.dtype.kind == "f":
        x = x.astype(np.float32, copy=False)
        if not all(np.isfinite(x[at : at + _ROWS]).all() for at in range(0, len(x), _ROWS)):
            raise CoterieError(f"items of {name} contain values that are not finite numbers")
        if kind == "tokens":
            raise CoterieError(f"token ids of {name} must be whole numbers, not floats")
    elif kind == "tokens" or (kind is None and x.ndim == 2 and x.dtype.kind in "ui" and x.dtype != np.uint8):
        if x.min() < 0:
            raise CoterieError(
                f'items of {name} are whole numbers and some are negative: give floats or items="numbers" if they are '
                "numbers; token ids must not be negative"
            )
        if x.max() > _LARGEST_TOKEN:
            raise CoterieError(
                f"items of {name} are whole numbers up to {x.max()}, too large for token ids; give floats or "
                'items="numbers" if they are numbers'
            )
        return torch.from_numpy(x.astype(np.int64))
    elif x.dtype != np.uint8:
        pixels = x.dtype.kind != "b" and kind in (None, "pictures") and x.ndim >= 3 and x.min() >= 0 and x.max() <= 255
        x = x.astype(np.uint8 if pixels else np.float32)
    if x.dtype == np.uint8 and (x.ndim not in (3, 4) or kind in ("signals", "numbers")):
        x = x.astype(np.float32) / np.float32(255)
    if kind == "numbers":
        x = x.reshape(len(x), -1)
    if x.ndim == 1:
        x = x[:, None]
    return torch.from_numpy(np.ascontiguousarray(_channels_first(x, kind)))


def items_like(name: str, x: Any, dtype: torch.dtype, shape: tuple[int, ...], vocab: int | None = None) -> Tensor:
    """Bring raw items into the form of an existing data set, given by its type (bytes, floats, token ids) and shape.

    Arrays that the data set was made of become its items again: the values of a few items decide nothing.
    """
    x = _plain(_inputs(x, name) if isinstance(x, Mapping) else x, f"items of {name}")
    if x.ndim == 0 or x.size == 0:
        raise CoterieError(f"{name} has no items")
    if x.dtype.kind == "U":
        if dtype != torch.int64 or vocab != VOCABULARY or shape != (LENGTH,) or x.size != len(x):
            raise CoterieError(f"items of {name} are texts, and the model takes {_wanted(dtype, shape)}")
        return torch.from_numpy(tokens(x.reshape(len(x))))
    if x.dtype.kind not in "buif":
        raise CoterieError(f"items of {name} are of type {x.dtype}, and the model takes {_wanted(dtype, shape)}")
    if dtype == torch.float32:
        if x.dtype == np.uint8 and x.ndim >= 3:
            raise CoterieError(
                f"items of {name} are bytes, and the model was trained on floats; give floats on the scale of training"
            )
        x = x.astype(np.float32) / np.float32(255 if x.dtype == np.uint8 else 1)
        if not np.isfinite(x).all():
            raise CoterieError(f"items of {name} contain values that are not finite numbers")
    elif x.dtype.kind == "f":
        hint = "; give bytes from 0 to 255" if dtype == torch.uint8 else ""
        raise CoterieError(f"items of {name} are floats, and the model was trained on {_KINDS[dtype]}{hint}")
    else:
        largest = 255 if dtype == torch.uint8 else vocab - 1 if vocab else None
        if x.min() < 0 or (largest is not None and x.max() > largest):
            raise CoterieError(
                f"items of {name} run from {x.min()} to {x.max()}, and the model was trained on {_KINDS[dtype]} from 0 "
                f"to {largest}"
            )
        x = x.astype(np.uint8 if dtype == torch.uint8 else np.int64)
    if x.ndim == 1:
        x = x[:, None]
    forms = (x,) if dtype == torch.int64 else (*(_channels_first(x, kind) for kind in (None, *ITEM_KINDS[:2])), x)
    forms = (*forms, x.reshape(len(x), -1)) if len(shape) == 1 else forms
    fitting = next((a for a in forms if a.shape[1:] == shape), None)
    if fitting is None:
        hint = f"; give a single item as an array of shape {(1, *shape)}" if x.shape in (shape, (*shape, 1)) else ""
        raise CoterieError(
            f"items of {name} have shape {tuple(x.shape[1:])}, and the model takes {_wanted(dtype, shape)}{hint}"
        )
    return torch.from_numpy(np.ascontiguousarray(fitting))


_KINDS = {torch.uint8: "bytes", torch.float32: "floats", torch.int64: "token ids"}


def _wanted(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{_KINDS[dtype]} of shape {shape}"


def _channels_first(x: Array, kind: str | None = None) -> Array:
    """Return pictures as [n, C, H, W] and signals as [n, C, T].

    Without a kind, items [n, a, b] are grey pictures if they are bytes, or if both sides have at least 8 values and the
    longer one at most twice as many as the shorter one.
    """
    if x.ndim == 4 and x.shape[-1] in (1, 3, 4) and (x.shape[1] not in (1, 3, 4) or x.shape[1] > x.shape[-1]):
        return x.transpose(0, 3, 1, 2)
    if x.ndim == 3 and kind != "signals":
        short, long = sorted(x.shape[1:])
        if kind == "pictures" or x.dtype == np.uint8 or short == long or (short >= 8 and long <= 2 * short):
            return x[:, None]  # grey pictures
    if x.ndim == 3 and x.shape[1] > x.shape[2]:
        return x.transpose(0, 2, 1)  # signals: time is the longer axis
    return x


def _part(name: str, raw: RawData, n_train: int) -> Tensor | None:
    if raw.split is None:
        return None
    if raw.y_test is not None and len(raw.y_test):
        raise CoterieError(f"{name} has both a split and a test part; put all items into x, or remove the split")
    part = split_codes(name, raw.split, n_train)
    if not (part == 0).any():
        raise CoterieError(f"the split of {name} has no training items")
    return torch.from_numpy(part)


def _group(name: str, raw: RawData, n_train: int) -> Tensor | None:
    if raw.group is None:
        return None
    n_test = 0 if raw.y_test is None else len(raw.y_test)
    if n_test and raw.group_test is None:
        raise CoterieError(f"{name} names the groups of its training part but not of its test part")
    group = raw.group if not n_test or raw.group_test is None else np.concatenate([raw.group, raw.group_test])
    return torch.from_numpy(group_codes(name, group, n_train + n_test))


def _owner(name: str, raw: RawData, n_train: int) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return the client number of each item, and the clients' names; clients are numbered in sorted order."""
    if raw.client is None:
        return None, None
    n_test = 0 if raw.y_test is None else len(raw.y_test)
    if n_test and raw.client_test is None:
        raise CoterieError(f"{name} names the clients of its training part but not of its test part")
    owner = raw.client if raw.client_test is None else np.concatenate([raw.client, raw.client_test])
    if owner.shape != (n_train + n_test,):
        raise CoterieError(
            f"{name} has {n_train + n_test} items but client ids of shape {owner.shape}; it must be one value per item"
        )
    missing = [owner[i] for i in np.flatnonzero(owner != owner)[:1]]  # NaN
    missing += [c for c in (owner if owner.dtype == object else ()) if c is None][:1]
    if missing:
        raise CoterieError(f"client ids of {name} contain {missing[0]}; every item needs the id of its client")
    if owner.dtype == object:
        owner = owner.astype(str)
    names, number = np.unique(owner, return_inverse=True)
    if "" in names.astype(str):
        raise CoterieError(f"client ids of {name} contain an empty text; every item needs the id of its client")
    return torch.from_numpy(number.astype(np.int64)), tuple(map(str, names))


def _length(source: Any, name: str) -> int:
    try:
        return len(source)
    except (TypeError, ValueError) as e:
        raise CoterieError(f"torch data set {name} must have a length: {e}") from None


def _item(source: Any, i: int, name: str) -> tuple[Any, Any]:
    try:
        item = source[i]
    except Exception as e:  # a user's code may raise anything
        raise CoterieError(f"item {i} of torch data set {name} cannot be read: {type(e).__name__}: {e}") from e
    if not isinstance(item, tuple | list) or len(item) != 2:
        given = f"{type(item).__name__} of {len(item)}" if hasattr(item, "__len__") else type(item).__name__
        raise CoterieError(f"torch data set {name} must give a pair (x, y) for each index; item {i} is a {given}")
    return item[0], item[1]


def _on_disk(sources: Sequence[Any], name: str) -> Array | None:
    """Return an array on disk for the items of torch data sets; None if they are bytes or floats of a small size."""
    n = sum(_length(source, name) for source in sources)
    first = np.asarray(_item(sources[0], 0, name)[0]) if _length(sources[0], name) else np.zeros(0)
    dtype = np.dtype(np.uint8) if first.dtype == np.uint8 else np.dtype(np.float32)
    fits = first.dtype.kind == "f" or first.dtype == np.uint8
    shape = (n, *first.shape)
    return empty_on_disk(shape, dtype) if fits and is_large(shape, dtype.itemsize) else None


def _read_items(source: Any, name: str, into: Array | None) -> tuple[Array, Array]:
    """Return all items, written to `into` if that is given, and all targets."""
    pairs = []
    for i in range(_length(source, name)):
        x, y = _item(source, i, name)
        if into is None:
            pairs.append((x, y))
            continue
        if (shape := np.shape(x)) != into.shape[1:]:
            raise CoterieError(f"items of torch data set {name} differ in shape: {into.shape[1:]} and {shape}")
        into[i] = np.asarray(x)
        pairs.append((0, y))
    if not pairs:
        raise CoterieError(f"torch data set {name} has no items")
    try:
        targets = np.stack([np.asarray(y) for _, y in pairs])
        return np.stack([np.asarray(x) for x, _ in pairs]) if into is None else into, targets
    except (TypeError, ValueError) as e:
        raise CoterieError(
            f"torch data set {name} must give a pair (x, y) for each index, all of one shape: {e}"
        ) from None


def _plain(values: Any, what: str) -> Array:
    """Return an array of numbers or texts; sparse matrices become dense. `what` names the array in errors."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise CoterieError(f"{what}: some values are masked, and a mask has no meaning here; fill or remove them")
    if hasattr(values, "toarray") and hasattr(values, "nnz"):  # scipy.sparse, which need not be installed
        values = values.toarray()
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            values = values.float() if values.dtype == torch.bfloat16 else values
        array: Array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as e:
        raise CoterieError(f"{what}: arrays of numbers or texts are needed: {e}") from None
    if array.dtype == object and array.ndim == 1 and all(isinstance(v, str) for v in array):
        return array.astype(str)
    return array


def _count(a: Array) -> int:
    return len(a) if a.ndim else 0
