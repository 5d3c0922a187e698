"""Read data frames, CSV and Parquet files as tables: pandas, polars, and whatever gives Arrow data."""

import csv
import logging
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.data.arrays import RawData, make_dataset
from coterie.data.dataset import Array, Dataset
from coterie.data.files import reading
from coterie.data.on_disk import empty_table, is_large
from coterie.data.table import (
    MOST_CATEGORIES,
    Column,
    ColumnKind,
    TableColumns,
    TableEncoding,
    check_names,
    too_many_categories,
)
from coterie.errors import CoterieError, unknown

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("coterie")
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
_MISSING_TEXTS = ["?"]  # further texts; pandas knows empty, NA, N/A, NaN, null, None, ...
_BOOLEANS = {"true": 1.0, "false": 0.0}
_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
_KINDS = get_args(ColumnKind)[:4]
_EXPECTED = {"number": "numbers", "boolean": "true and false", "date": "dates such as 2024-12-31"}
_LARGEST = 1e38  # limit of a number; float32 ends at 3.4e38
_MANY_TEXTS = 20  # different texts that are never suspicious


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
        target=_joined(target), features=_joined(features), client=_joined(client), split=_joined(split),
        group=_joined(group),
    )  # fmt: skip
    return table_dataset(name, to_pandas(frame, name), columns, task)


def read_table(path: Path) -> "pd.DataFrame":
    """Read a CSV, TSV or Parquet file as a data frame."""
    import pandas as pd  # slow to import

    if path.suffix.lower() == ".parquet":
        with reading(path, "a Parquet file"):
            import pyarrow.parquet as pq

            return to_pandas(pq.read_table(path), str(path))
    with reading(path, "a table of comma-separated values"):
        with path.open(newline="", encoding="utf-8-sig") as f:
            first = f.readline()
        if "\0" in first or not first.strip():
            raise ValueError("its first line holds no names of columns" if first.strip("\0\n\r ") else "it is empty")
        separator = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
        with path.open(newline="", encoding="utf-8-sig") as f:
            names, cells = islice(chain(csv.reader(f, delimiter=separator), [[], []]), 2)
    _check_unique(str(path), names)
    if len(cells) > len(names):  # pandas would take the first cells for names of rows
        raise CoterieError(f"rows of {path} have {len(cells)} cells, and its first line has {len(names)} names")
    with reading(path, "a table of comma-separated values"):
        return pd.read_csv(path, sep=separator, na_values=_MISSING_TEXTS, low_memory=False, encoding="utf-8-sig")


def load_table(path: Path, columns: TableColumns | None, task: str | None) -> Dataset:
    """Read a file as a Dataset. The rows of a large Parquet file are read column by column and stay on disk."""
    frame = _large_parquet(path) or read_table(path)
    if columns is None or columns.target is None:
        names = ", ".join(map(str, frame.columns[:10])) + (", ..." if len(frame.columns) > 10 else "")
        raise CoterieError(f"{path} is a table: name the column to predict (--target NAME); its columns are {names}")
    return table_dataset(path.stem, frame, columns, task)


class ParquetColumns:
    """A Parquet file as a frame whose columns are read when they are asked for, and not kept."""

    def __init__(self, path: Path, rows: int, columns: Sequence[str]):
        self.path, self.rows, self.columns = path, rows, list(columns)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, column: str) -> "pd.Series[Any]":
        import pyarrow.parquet as pq

        with reading(self.path, "a Parquet file"):
            table = pq.read_table(self.path, columns=[column])
        return to_pandas(table, str(self.path)).iloc[:, 0]


def _large_parquet(path: Path) -> ParquetColumns | None:
    """Return a Parquet file whose rows are too large for memory; None for every other file."""
    if path.suffix.lower() != ".parquet":
        return None
    with reading(path, "a Parquet file"):
        import pyarrow.parquet as pq

        about = pq.ParquetFile(path)
        names = about.schema_arrow.names
    return (
        ParquetColumns(path, about.metadata.num_rows, names)
        if is_large((about.metadata.num_rows, len(names)), 8)
        else None
    )


def to_pandas(given: Any, name: str) -> "pd.DataFrame":
    """Return a data frame of pandas, polars or Arrow as one of pandas; decimal numbers become floats."""
    import pandas as pd

    frame = given

    if not isinstance(frame, pd.DataFrame):
        import pyarrow as pa

        try:
            frame = pa.table(frame).to_pandas() if hasattr(frame, "__arrow_c_stream__") else None
        except pa.ArrowException:  # one column, such as a Series
            frame = None
        if frame is None:
            raise CoterieError(
                f"{name} is of type {type(given).__name__}; a data frame of pandas or polars is needed (arrays: "
                "from_arrays)"
            )
    for i in range(frame.shape[1]):
        present = frame.iloc[:, i].dropna() if frame.dtypes.iloc[i].kind == "O" else ()
        if len(present) and all(isinstance(v, Decimal) for v in present):
            frame = frame.copy(deep=False)
            frame.isetitem(i, pd.to_numeric(frame.iloc[:, i]).astype(float))
    return frame


def table_dataset(
    name: str, frame: "pd.DataFrame | ParquetColumns", columns: TableColumns, task: str | None
) -> Dataset:
    """Return the rows of a frame as a Dataset whose features are not encoded yet."""
    names = [str(c) for c in frame.columns]
    _check_unique(name, names)
    if len(frame) == 0:
        raise CoterieError(f"{name} has no rows")
    frame = frame if isinstance(frame, ParquetColumns) else frame.set_axis(names, axis=1)
    targets = columns.target_names
    marked = [c for c in (*targets, columns.client, columns.split, columns.group) if c is not None]
    if columns.one_client and columns.client not in names:
        marked = [c for c in marked if c != columns.client]
    if not targets:
        raise CoterieError(f"target must name the column of {name} to predict")
    for c in names:
        if "," in c and any(c in text for text in (columns.target, columns.features) if text):
            raise CoterieError(f'column "{c}" of {name} has a comma in its name, which separates names; rename it')
    check_names(name, marked, names)
    features, kinds = _features(name, columns.features, names)
    notes = []
    if columns.features is None:
        unnamed = [c for c in names if not c.strip() or re.fullmatch(r"Unnamed: \d+", c)]
        features = [c for c in names if c not in marked and c not in unnamed]
        notes += [f"column {names.index(c) + 1} of {name} has no name and is left out" for c in unnamed]
    roles = [*((t, "target") for t in targets), (columns.client, "client"), (columns.split, "split")]
    roles += [(columns.group, "group"), *((c, "feature") for c in features)]
    _check_roles(name, [(c, role) for c, role in roles if c is not None])
    if not features and columns.features is not None:
        raise CoterieError(f"features names no column of {name}; leave it out to take all columns")
    if not features:
        raise CoterieError(f"{name} has no feature columns besides {', '.join(marked)}")
    x, read = empty_table(len(frame), len(features)), []
    for i, c in enumerate(features):
        values = frame[c]
        column, x[:, i] = _read_column(name, c, values, kinds.get(c))
        read.append(column)
        notes += _category_notes(name, column, values, c in kinds)
    notes += [note for c in marked for note in _look_alikes(name, c, frame[c])]
    encoding = TableEncoding(columns=tuple(read), target=tuple(targets), client=columns.client)
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
        if (np.abs(given) > _LARGEST).any():
            raise CoterieError(f"{name} contains infinite values, or values beyond {_LARGEST:g}")
        return given.astype(np.float64)
    if isinstance(given, dict):
        try:
            given = pd.DataFrame(given)
        except ValueError:  # single values, or columns of different lengths
            raise CoterieError(f"{name} must hold a list of values for each column, all of one length") from None
    frame = to_pandas(given, name)
    if len(frame) == 0:
        raise CoterieError(f"{name} has no rows")
    _check_unique(name, [str(c) for c in frame.columns])
    check_names(name, [c.name for c in encoding.columns], list(frame.columns))
    for c in encoding.columns:
        _check_cells(name, c.name, frame[c.name])
    rows = np.stack([_like(name, c, frame[c.name]) for c in encoding.columns], 1)
    for i, c in enumerate(encoding.columns):
        if c.kind == "category" and (n := int((rows[:, i] < 0).sum())):
            new = frame[c.name][rows[:, i] < 0].iloc[0]
            log.warning(
                '%s of %s values in column "%s" of %s are categories that the model has not seen, such as "%s"; they '
                "count as none of %s",
                n, int((~np.isnan(rows[:, i])).sum()), c.name, name, new, ", ".join(c.categories[:5]),
            )  # fmt: skip
    return rows


def target_values(frame: Any, encoding: TableEncoding, name: str) -> Array | None:
    """Return the targets in a frame of new rows; None if it lacks one of their columns or has gaps there."""
    frame = to_pandas(frame, name)
    known = all(t in frame.columns and not frame[t].isna().any() for t in encoding.target)
    return _targets(name, frame, encoding.target) if known else None


def _check_unique(name: str, names: Sequence[str]) -> None:
    if twice := [c for i, c in enumerate(names) if c in names[:i]]:
        raise CoterieError(f'{name} has two columns called "{twice[0]}"; columns need different names')


def _check_roles(name: str, roles: Sequence[tuple[str, str]]) -> None:
    """Raise CoterieError if a column has two roles."""
    known: dict[str, str] = {}
    for column, role in roles:
        if column in known:
            raise CoterieError(f'column "{column}" of {name} is named twice: as {known[column]} and as {role}')
        known[column] = role


def _check_cells(name: str, column: str, values: "pd.Series[Any]") -> None:
    """Raise CoterieError if cells of a column hold several values, as those of nested Parquet columns do."""
    cells = values if values.dtype.kind == "O" else ()
    if (nested := next((v for v in cells if isinstance(v, list | dict | set | np.ndarray)), None)) is not None:
        raise CoterieError(
            f'cells of column "{column}" of {name} hold several values ({type(nested).__name__}), which are not read; '
            "leave the column out of features, or make columns of single values from it"
        )


def _category_notes(name: str, column: Column, values: "pd.Series[Any]", named: bool) -> list[str]:
    """Return a note if texts are read as categories and may mean something else; none if their kind is `named`."""
    import pandas as pd

    texts = pd.Series(column.categories, dtype=object)
    if named or len(texts) < 3 or isinstance(values.dtype, pd.CategoricalDtype):
        return []
    number = pd.to_numeric(texts.str.replace(",", ".").str.strip(" %<>"), errors="coerce").notna()
    if number.mean() >= 0.5:
        odd = next(iter(texts[pd.to_numeric(texts, errors="coerce").isna()]), texts[0])
        return [
            f'column "{column.name}" of {name} holds numbers and texts such as "{odd}", so it is read as {len(texts)} '
            f"categories; correct these cells, or confirm with --features ...,{column.name}:category"
        ]
    if len(texts) > max(_MANY_TEXTS, values.notna().sum() // 2):
        return [
            f'column "{column.name}" of {name} holds {len(texts)} different texts in {len(values)} rows and is read as '
            "categories; leave it out of features if it holds names or record numbers, and write dates as YYYY-MM-DD"
        ]
    return _look_alikes(name, column.name, values)


def _look_alikes(name: str, column: str, values: "pd.Series[Any]") -> list[str]:
    """Return a note if texts of a column differ in spaces or capital letters only."""
    first: dict[str, str] = {}
    for text in (v for v in values.unique() if isinstance(v, str)):
        other = first.setdefault(text.strip().lower(), text)
        if other != text:
            return [
                f'"{other}" and "{text}" in column "{column}" of {name} are taken for different values, though they '
                "differ in spaces or capital letters only"
            ]
    return []


def _joined(names: object) -> str | None:
    """Return one or several names of columns as a text; names of pandas may be numbers."""
    if names is None or isinstance(names, str):
        return names
    return ",".join(map(str, names)) if isinstance(names, Iterable) else str(names)


def _names(text: str | None) -> list[str]:
    return [] if text is None else [c.strip() for c in text.split(",") if c.strip()]


def _features(name: str, text: str | None, names: Sequence[str]) -> tuple[list[str], dict[str, ColumnKind]]:
    """Return the named features, and the kinds that NAME:KIND gives to some of them."""
    features: list[str] = []
    kinds: dict[str, ColumnKind] = {}
    for given in _names(text):
        column, _, kind = given.rpartition(":")
        if given not in names and column in names and kind not in _KINDS:
            raise unknown("kind of column", kind, _KINDS)
        if given not in names and column:
            kinds[column] = next(k for k in _KINDS if k == kind)
            given = column
        features.append(given)
    check_names(name, features, names)
    _check_unique(f"features of {name}", features)
    return features, kinds


def _whole(name: str, frame: "pd.DataFrame | ParquetColumns", column: str, what: str) -> Array:
    """Return a column without gaps as an array; raise CoterieError if a value is missing."""
    _check_cells(name, column, frame[column])
    if gaps := int(frame[column].isna().sum()):
        raise CoterieError(
            f'column "{column}" of {name}, {what}, has {gaps} {"gap" if gaps == 1 else "gaps"}; fill them or remove '
            "these rows"
        )
    values: Array = frame[column].to_numpy()
    if values.dtype.kind == "f" and (values == np.floor(values)).all():
        return values.astype(np.int64)
    return values if values.dtype.kind in "ui" else values.astype(str)


def _targets(name: str, frame: "pd.DataFrame | ParquetColumns", targets: Sequence[str]) -> Array:
    """Return targets [n, k]: texts and booleans as names of classes, everything else as floats."""
    columns = [_whole(name, frame, t, "the target") for t in targets]
    for t in targets:
        if _kind(name, t, frame[t]) == "date":
            raise CoterieError(
                f'column "{t}" of {name}, the target, holds dates; make a number from them, such as days'
            )
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
    _check_cells(name, column, values)
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
    try:
        numbers = _converted(column, values)
    except (ValueError, TypeError, KeyError):
        raise _unlike(name, column, _first_unlike(column, values)) from None
    if (np.abs(numbers) > _LARGEST).any():
        raise CoterieError(f'column "{column.name}" of {name} contains infinite values, or values beyond {_LARGEST:g}')
    if column.kind == "boolean" and (odd := numbers[~np.isnan(numbers) & (numbers != 0) & (numbers != 1)]).size:
        raise _unlike(name, column, f"{odd[0]:g}")
    return numbers


def _converted(column: Column, values: "pd.Series[Any]") -> NDArray[np.float64]:
    """Return values as numbers; pandas or Python raise an error if one is not of the column's kind."""
    import pandas as pd

    if column.kind == "empty":
        return np.full(len(values), np.nan)
    if column.kind == "category":
        position = {c: float(k) for k, c in enumerate(column.categories)}
        codes = {v: position.get(_text(v), -1.0) for v in values.dropna().unique()}
        return _floats(values.astype(object).map(codes))
    if column.kind == "date":
        if values.dtype.kind in "buif" and values.notna().any():
            raise ValueError  # pandas reads numbers as years
        dates = pd.to_datetime(values, utc=True, **({} if values.dtype.kind == "M" else {"format": "ISO8601"}))
        return _floats((dates - pd.Timestamp("2000-01-01", tz="UTC")) / pd.Timedelta(days=1))
    if column.kind == "boolean" and values.dtype.kind not in "buif":
        words = {v: _BOOLEANS[str(v).lower()] for v in values.dropna().unique()}
        return _floats(values.astype(object).map(words))
    return _floats(pd.to_numeric(values))


def _unlike(name: str, column: Column, value: object) -> CoterieError:
    return CoterieError(f'column "{column.name}" of {name} must hold {_EXPECTED[column.kind]}, not "{value}"')


def _first_unlike(column: Column, values: "pd.Series[Any]") -> object:
    """Return the first value that is not of the column's kind."""
    for i in range(len(values)):
        try:
            _converted(column, values.iloc[i : i + 1])
        except (ValueError, TypeError, KeyError):
            return values.iloc[i]
    return values.dtype


def _floats(values: "pd.Series[Any]") -> NDArray[np.float64]:
    floats: NDArray[np.float64] = values.to_numpy(np.float64, na_value=np.nan)
    return floats
