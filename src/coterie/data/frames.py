"""Read data frames, CSV and Parquet files as tables: pandas, polars, and whatever gives Arrow data."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.data.arrays import RawData, make_dataset
from coterie.data.dataset import Array, Dataset
from coterie.data.files import reading
from coterie.data.table import (
    MOST_CATEGORIES,
    Column,
    ColumnKind,
    TableColumns,
    TableEncoding,
    check_names,
    too_many_categories,
)
from coterie.errors import CoterieError

if TYPE_CHECKING:
    import pandas as pd

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
_MISSING_TEXTS = ["?"]  # further texts; pandas knows empty, NA, N/A, NaN, null, None, ...
_BOOLEANS = {"true": 1.0, "false": 0.0}
_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
_KINDS = get_args(ColumnKind)[:4]


def from_frame(
    frame: Any,
    *,
    target: str | Sequence[str],
    client: str | None = None,
    features: Sequence[str] | None = None,
    split: str | None = None,
    group: str | None = None,
    task: str | None = None,
    name: str = "frame",
) -> Dataset:
    """Make a Dataset from a data frame of pandas or polars, or from any object with Arrow data.

    `target` names the column to predict (several for survival and multi-label tasks), `client` the column that says
    whose row it is, and `features` the columns that the model sees: by default all others. A feature is a number, a
    boolean, a date or a category; `NAME:category` names its kind. `split` is a column of train, val and test, and rows
    with the same value of the column `group` are never divided. Scales and lists of categories are learnt later, from
    training rows only.
    """
    columns = TableColumns(
        target=target if isinstance(target, str) else ",".join(target), client=client, split=split, group=group,
        features=None if features is None else features if isinstance(features, str) else ",".join(features),
    )  # fmt: skip
    return table_dataset(name, to_pandas(frame, name), columns, task)


def read_table(path: Path) -> "pd.DataFrame":
    """Read a CSV, TSV or Parquet file as a data frame."""
    import pandas as pd  # slow to import

    if path.suffix.lower() == ".parquet":
        with reading(path, "a Parquet file"):
            import pyarrow.parquet as pq

            return pq.read_table(path).to_pandas()
    with reading(path, "a table of comma-separated values"):
        with path.open(newline="", encoding="utf-8-sig") as f:
            first = f.readline()
        if "\0" in first or not first.strip():
            raise ValueError("its first line holds no names of columns" if first.strip("\0\n\r ") else "it is empty")
        separator = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
        names = next(csv.reader([first], delimiter=separator))
    _check_unique(str(path), names)
    with reading(path, "a table of comma-separated values"):
        return pd.read_csv(path, sep=separator, na_values=_MISSING_TEXTS, low_memory=False, encoding="utf-8-sig")


def load_table(path: Path, columns: TableColumns | None, task: str | None) -> Dataset:
    """Read a file as a Dataset."""
    frame = read_table(path)
    if columns is None or columns.target is None:
        names = ", ".join(map(str, frame.columns[:10])) + (", ..." if frame.shape[1] > 10 else "")
        raise CoterieError(f"{path} is a table: name the column to predict (--target NAME); its columns are {names}")
    return table_dataset(path.stem, frame, columns, task)


def to_pandas(frame: Any, name: str) -> "pd.DataFrame":
    """Return a data frame of pandas, polars or Arrow as one of pandas."""
    import pandas as pd

    if isinstance(frame, pd.DataFrame):
        return frame
    if not hasattr(frame, "__arrow_c_stream__"):
        raise CoterieError(
            f"{name} is of type {type(frame).__name__}; a data frame of pandas or polars is needed (arrays: "
            "from_arrays)"
        )
    import pyarrow as pa

    return pa.table(frame).to_pandas()


def table_dataset(name: str, frame: "pd.DataFrame", columns: TableColumns, task: str | None) -> Dataset:
    """Return the rows of a frame as a Dataset whose features are not encoded yet."""
    names = [str(c) for c in frame.columns]
    _check_unique(name, names)
    if len(frame) == 0:
        raise CoterieError(f"{name} has no rows")
    frame = frame.set_axis(names, axis=1)
    targets = columns.target_names
    marked = [c for c in (*targets, columns.client, columns.split, columns.group) if c is not None]
    if columns.one_client and columns.client not in names:
        marked = [c for c in marked if c != columns.client]
    check_names(name, marked, names)
    notes = []
    features, kinds = _features(name, columns.features, names)
    if columns.features is None:
        unnamed = [c for c in names if not c.strip() or re.fullmatch(r"Unnamed: \d+", c)]
        features = [c for c in names if c not in marked and c not in unnamed]
        notes += [f"column {names.index(c) + 1} of {name} has no name and is left out" for c in unnamed]
    if twice := [c for c in features if c in marked]:
        raise CoterieError(f'column "{twice[0]}" of {name} is named both as a feature and as something else')
    if not features:
        raise CoterieError(f"{name} has no feature columns besides {', '.join(marked)}")
    raw = {c: _read_column(name, c, frame[c], kinds.get(c)) for c in features}
    encoding = TableEncoding(columns=tuple(c for c, _ in raw.values()), target=tuple(targets), client=columns.client)
    x = np.stack([values for _, values in raw.values()], 1)
    wanted = {"client": None if columns.one_client else columns.client, "split": columns.split, "group": columns.group}
    marks: dict[str, Any] = {k: _whole(name, frame, c, f"the {k}") for k, c in wanted.items() if c is not None}
    raw_data = RawData(x, _targets(name, frame, targets), **marks)
    return make_dataset(name, raw_data, task, encoding, notes)


def rows_like(name: str, given: Any, encoding: TableEncoding) -> NDArray[np.float64]:
    """Return new rows of a frame, a dictionary of columns, or a matrix as raw rows of an encoding [n, columns]."""
    import pandas as pd

    if isinstance(given, np.ndarray):
        if given.ndim != 2 or given.shape[1] != len(encoding.columns) or given.dtype.kind not in "buif":
            raise CoterieError(f"{name} must have {len(encoding.columns)} numbers per row, or be a data frame")
        return given.astype(np.float64)
    frame = pd.DataFrame(given) if isinstance(given, dict) else to_pandas(given, name)
    if len(frame) == 0:
        raise CoterieError(f"{name} has no rows")
    check_names(name, [c.name for c in encoding.columns], list(frame.columns))
    return np.stack([_like(name, c, frame[c.name]) for c in encoding.columns], 1)


def target_values(frame: Any, encoding: TableEncoding, name: str) -> Array | None:
    """Return the targets in a frame of new rows; None if it lacks one of their columns or has gaps there."""
    frame = to_pandas(frame, name)
    known = all(t in frame.columns and not frame[t].isna().any() for t in encoding.target)
    return _targets(name, frame, encoding.target) if known else None


def _check_unique(name: str, names: Sequence[str]) -> None:
    if twice := [c for i, c in enumerate(names) if c in names[:i]]:
        raise CoterieError(f'{name} has two columns called "{twice[0]}"; columns need different names')


def _names(text: str | None) -> list[str]:
    return [] if text is None else [c.strip() for c in text.split(",") if c.strip()]


def _features(name: str, text: str | None, names: Sequence[str]) -> tuple[list[str], dict[str, ColumnKind]]:
    """Return the named features, and the kinds that NAME:KIND gives to some of them."""
    features: list[str] = []
    kinds: dict[str, ColumnKind] = {}
    for given in _names(text):
        column, _, kind = given.rpartition(":")
        if given not in names and column and kind in _KINDS:
            kinds[column] = next(k for k in _KINDS if k == kind)
            given = column
        features.append(given)
    check_names(name, features, names)
    _check_unique(f"features of {name}", features)
    return features, kinds


def _whole(name: str, frame: "pd.DataFrame", column: str, what: str) -> Array:
    """Return a column without gaps as an array; raise CoterieError if a value is missing."""
    if gaps := int(frame[column].isna().sum()):
        raise CoterieError(
            f'column "{column}" of {name}, {what}, has {gaps} {"gap" if gaps == 1 else "gaps"}; fill them or remove '
            "these rows"
        )
    values: Array = frame[column].to_numpy()
    if values.dtype.kind == "f" and (values == np.floor(values)).all():
        return values.astype(np.int64)
    return values if values.dtype.kind in "ui" else values.astype(str)


def _targets(name: str, frame: "pd.DataFrame", targets: Sequence[str]) -> Array:
    """Return targets [n, k]: texts and booleans as names of classes, everything else as floats."""
    columns = [_whole(name, frame, t, "the target") for t in targets]
    numbers = [frame[t].dtype.kind in "uif" for t in targets]
    if all(numbers) or (len(targets) > 1 and all(frame[t].dtype.kind in "buif" for t in targets)):
        return np.stack([frame[t].to_numpy(np.float64) for t in targets], 1)
    if len(targets) > 1:
        raise CoterieError(
            f'column "{targets[numbers.index(False)]}" of {name} holds texts; several targets are numbers'
        )
    return columns[0].astype(str)[:, None]


def _read_column(name: str, column: str, values: "pd.Series[Any]", kind: ColumnKind | None) -> tuple[Column, Any]:
    """Return a column with its kind and list of categories, and its raw values [n]."""
    kind = kind or _kind(name, column, values)
    categories: tuple[str, ...] = ()
    if kind == "category":
        categories = tuple(sorted({_text(v) for v in values.dropna().unique()}))
        if len(categories) > MOST_CATEGORIES:
            raise CoterieError(too_many_categories(column, len(categories)))
    described = Column(name=column, kind=kind, categories=categories)
    return described, _like(name, described, values)


def _kind(name: str, column: str, values: "pd.Series[Any]") -> ColumnKind:
    """Return the kind of a column from its type and, if it holds objects, from its values."""
    import pandas as pd

    present = values.dropna()
    if not len(present):
        return "empty"
    if pd.api.types.is_bool_dtype(values.dtype):
        return "boolean"
    if pd.api.types.is_numeric_dtype(values.dtype) and not pd.api.types.is_complex_dtype(values.dtype):
        return "number"
    if pd.api.types.is_datetime64_any_dtype(values.dtype):
        return "date"
    if isinstance(values.dtype, pd.CategoricalDtype):
        return "category"
    if not (pd.api.types.is_object_dtype(values.dtype) or pd.api.types.is_string_dtype(values.dtype)):
        raise CoterieError(f'column "{column}" of {name} is of type {values.dtype}, which is not read')
    different = present.unique()
    if all(str(v).lower() in _BOOLEANS for v in different):
        return "boolean"
    if all(isinstance(v, int | float | np.number) for v in different):
        return "number"
    if all(_ISO_DATE.fullmatch(str(v)) for v in different):
        return "date"
    return "category"


def _text(value: object) -> str:
    """Return a category as text; whole numbers are written without a decimal point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _like(name: str, column: Column, values: "pd.Series[Any]") -> NDArray[np.float64]:
    """Return the raw values of a column [n]; missing ones are NaN."""
    import pandas as pd

    if column.kind == "empty":
        return np.full(len(values), np.nan)
    if column.kind == "category":
        position = {c: float(k) for k, c in enumerate(column.categories)}
        codes = {v: position.get(_text(v), -1.0) for v in values.dropna().unique()}
        return _floats(values.astype(object).map(codes))
    try:
        if column.kind == "date":
            dates = pd.to_datetime(values, utc=True, **({} if values.dtype.kind == "M" else {"format": "ISO8601"}))
            days = (dates - pd.Timestamp("2000-01-01", tz="UTC")) / pd.Timedelta(days=1)
            return _floats(days)
        if column.kind == "boolean" and values.dtype.kind not in "buif":
            words = {v: _BOOLEANS[str(v).lower()] for v in values.dropna().unique()}
            return _floats(values.astype(object).map(words))
        numbers = _floats(pd.to_numeric(values))
    except (ValueError, TypeError, KeyError) as e:
        reason = " ".join(str(e).split())[:100]
        raise CoterieError(f'column "{column.name}" of {name} must hold {column.kind} values: {reason}') from None
    if np.isinf(numbers).any():
        raise CoterieError(f'column "{column.name}" of {name} contains infinite values')
    return numbers


def _floats(values: "pd.Series[Any]") -> NDArray[np.float64]:
    floats: NDArray[np.float64] = values.to_numpy(np.float64, na_value=np.nan)
    return floats
