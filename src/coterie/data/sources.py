"""Load data: by a known name, from a file, a folder, the hub, or by a function of the user."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from coterie.data import files, frames, hub
from coterie.data.arrays import from_arrays, from_torch, make_dataset
from coterie.data.catalogue import DATASETS, data_dir, locate, missing_message
from coterie.data.dataset import SUBSET, Dataset
from coterie.data.frames import from_frame
from coterie.data.natural import NATURAL
from coterie.data.table import TableColumns
from coterie.engine.provenance import import_named
from coterie.errors import CoterieError, unknown

_OTHER_TABLES = (".txt", ".feather", ".xls", ".xlsx", ".json", ".arff")


class DatasetInfo(NamedTuple):
    """A row of `coterie list data`."""

    name: str
    description: str
    classes: int  # 0 for natural federations, whose targets are numbers
    shape: tuple[int, ...]  # empty for natural federations
    available: bool
    task: str = "classification"
    clients: str = ""  # number and kind of natural clients
    licence: str = ""
    install: str = ""  # command that installs the package with the data


def load_dataset(
    name: str,
    data_dir: Path | None = None,
    subset: int | str | None = None,
    task: str | None = None,
    columns: TableColumns | None = None,
) -> Dataset:
    """Load a data set.

    `name` is a known name (also of a natural federation), the NAME of NAME.npz in the data folder, a path,
    `hub:owner/name` or `package.module:callable`. With `subset`, only that many samples are kept;
    "N+M" stands for N training and M official test samples, all drawn from the official training part.
    Targets of files that do not name their task are read for `task`. A table needs `columns`, which name its target.
    """
    if not re.fullmatch(SUBSET, str(1 if subset is None else subset)):
        raise CoterieError(f"subset must be at least 1, or N+M with N and M of at least 1, not {subset}")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise CoterieError(f"data-dir {data_dir} is not a folder")
    data = _load(name, None if data_dir is None else Path(data_dir), task, columns)
    if data.table is None and columns is not None and (given := columns.model_dump(exclude_defaults=True)):
        raise CoterieError(f"{next(iter(given))} names a column of a table, and {name} is none (CSV or Parquet file)")
    return data if subset is None else data.subset(*map(int, str(subset).split("+")))


def list_datasets(folder: Path | None = None) -> list[DatasetInfo]:
    """Return the known data sets, and whether their files are on this machine."""
    return [
        DatasetInfo(k.name, k.text, len(k.classes), k.shape, k.name == "digits" or locate(k, folder) is not None)
        for k in DATASETS.values()
    ] + [
        DatasetInfo(n.name, n.text, 0, (), n.path() is not None, n.task, n.clients, n.licence, n.install)
        for n in NATURAL.values()
    ]


def save_dataset(data: Dataset, path: Path) -> None:
    """Write a data set as an .npz file, which opens much faster than thousands of picture files."""
    if data.table is not None:
        raise CoterieError(f"{data.name} is a table; keep it as a CSV or Parquet file")
    test = data.is_test.numpy() if data.part is None else np.zeros(len(data), bool)
    arrays = {"classes": np.array(data.classes)} if data.classes else {}
    arrays["task"] = np.array(data.kind)
    if data.x.dtype == torch.int64:
        arrays["items"] = np.array("tokens")
    elif data.x.dim() < 5:
        arrays["items"] = np.array({2: "numbers", 3: "signals", 4: "pictures"}[data.x.dim()])
    if data.part is not None:
        arrays["split"] = data.part.numpy()
    for part, rows in (("train", ~test), ("test", test)):
        if rows.any() or part == "train":
            arrays |= {f"x_{part}": data.x.numpy()[rows], f"y_{part}": data.y.numpy()[rows]}
            if data.owner is not None:
                owner = data.owner.numpy()[rows]
                arrays[f"client_{part}"] = owner if data.client_names is None else np.array(data.client_names)[owner]
            if data.group is not None:
                arrays[f"group_{part}"] = data.group.numpy()[rows]
    part_file = path.with_name(path.name + ".part.npz")
    np.savez_compressed(part_file, **arrays)  # type: ignore[arg-type]  # the stub takes **kwds for its flags
    part_file.replace(path)


def digits() -> Dataset:
    """Return scikit-learn's 1,797 digits as float32 in 0..1; every fifth digit is in the test part."""
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    x, y = load_digits(return_X_y=True)
    pictures = torch.from_numpy((x / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
    is_test = torch.arange(len(y)) % 5 == 4
    train = pictures[~is_test].double()
    labels = torch.from_numpy(y.astype(np.int64))
    mean, std = (float(train.mean()),), (float(train.std(unbiased=False)),)
    return Dataset("digits", pictures, labels, DATASETS["digits"].classes, is_test, None, mean, std)


def _load(name: str, folder: Path | None, task: str | None, columns: TableColumns | None) -> Dataset:
    if name == "digits":
        return digits()
    if name in DATASETS:
        paths = locate(DATASETS[name], folder)
        if paths is None:
            raise CoterieError(missing_message(DATASETS[name], folder))
        return make_dataset(name, DATASETS[name].load(paths))
    if name in NATURAL:
        return make_dataset(name, NATURAL[name].load())
    if name.startswith("hub:"):
        return make_dataset(name, hub.read_hub(name.removeprefix("hub:")))
    named_file = (folder or data_dir()) / f"{name}.npz"
    if "/" not in name and _path(str(named_file))[1] == "file":
        return make_dataset(name, files.npz(named_file), task)
    path, kind = _path(name)
    if kind == "folder":
        return make_dataset(path.resolve().name, files.folder(path))
    if kind == "file" and path.suffix.lower() in frames.TABLE_SUFFIXES:
        return frames.load_table(path, columns, task)
    if kind == "file" and path.suffix.lower() in _OTHER_TABLES:
        raise CoterieError(
            f"{name} is a table, which is not read directly: read it with pandas in a function that returns "
            "coterie.from_frame(frame, target=..., client=...), and give --data module:function"
        )
    if kind == "file" or path.suffix == ".npz":
        return make_dataset(path.stem, files.npz(path), task)
    if ":" in name and not kind:
        return _call(name)
    if "/" in name or path.suffix.lower() in (*frames.TABLE_SUFFIXES, *_OTHER_TABLES):
        raise CoterieError(
            f"{name} does not exist; data can be a known name, an .npz, .csv or .parquet file, a folder of pictures or "
            "hub:NAME"
        )
    root = folder or data_dir()
    raise unknown("data", name, [*DATASETS, *NATURAL, *(p.stem for p in root.glob("*.npz"))])


def _path(name: str) -> tuple[Path, Literal["file", "folder", ""]]:
    """Return a name as a path, and whether a file or a folder exists there."""
    try:
        path = Path(name).expanduser()
        kind: Literal["file", "folder", ""] = "folder" if path.is_dir() else "file" if path.is_file() else ""
        if not kind and path.exists():
            raise CoterieError(f"{name} is neither a file nor a folder (a pipe or a device is not read)")
        return path, kind
    except (OSError, ValueError, RuntimeError) as e:  # too long, a forbidden character, an unknown user
        raise CoterieError(f'data "{name[:80]}" cannot be a name or a path: {e}') from None


def _call(name: str) -> Dataset:
    """Import and call `module:function` of the user and return its Dataset."""
    try:
        make = import_named(name)
    except CoterieError:
        raise
    except Exception as e:  # a user's module may raise anything while it is imported
        raise CoterieError(f'data "{name}" cannot be imported: {e}') from e
    return call_data_function(make, f'data "{name}"')


def call_data_function(make: Callable[[], object], name: str) -> Dataset:
    """Call a user's function; raise CoterieError with `name` if it fails or returns anything but a Dataset."""
    try:
        data = make()
    except CoterieError:
        raise
    except Exception as e:  # a user's code may raise anything
        raise CoterieError(f"{name} failed: {type(e).__name__}: {e}") from e
    if not isinstance(data, Dataset):
        raise CoterieError(f"{name} returned {type(data).__name__}; it must return a Dataset")
    return data


__all__ = [
    "DatasetInfo", "digits", "from_arrays", "from_frame", "from_torch", "list_datasets", "load_dataset", "save_dataset",
]  # fmt: skip
