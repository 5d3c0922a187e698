"""Tables: how the columns of a table become the numbers that a model takes, and how that is learnt from training rows.

A table is held as a matrix of float64 [rows, columns]: numbers, booleans as 0 and 1, dates as days since 2000-01-01,
categories as positions in the column's list (-1 if they are not in it), and NaN where a value is missing. Its encoding
makes features of it: standardised numbers, one 0 or 1 for each category, and one 0 or 1 for missing values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import Tensor

from coterie.core.states import register
from coterie.data.on_disk import copy_table
from coterie.errors import CoterieError

MOST_CATEGORIES = 100  # categories of a column; more are names, numbers of records or free text
_CONSTANT = 1e-12  # deviation of a column relative to its mean, below which it is constant
ColumnKind = Literal["number", "boolean", "date", "category", "empty"]
_Deviation = Annotated[FiniteFloat, Field(gt=0)]


class TableColumns(BaseModel):
    """The columns of a table that have a meaning, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str | None = None  # several targets are separated by commas
    client: str | None = None
    features: str | None = None  # separated by commas; NAME:category (or another kind) names the kind; None: the others
    split: str | None = None  # holds train, val or test
    group: str | None = None
    one_client: bool = False  # True: all rows are of one client, and the column of clients may be absent

    @property
    def target_names(self) -> list[str]:
        """The names of the target columns."""
        return [] if self.target is None else [c.strip() for c in self.target.split(",") if c.strip()]


class Column(BaseModel):
    """A column of a table and its encoding."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: ColumnKind  # empty: no training row has a value, and the column gives no feature
    mean: FiniteFloat = 0.0  # mean of the training rows that have a value; takes the place of missing values
    std: _Deviation = 1.0
    categories: tuple[str, ...] = ()
    indicator: bool = False  # True: a further feature is 1 where the value is missing


class TableEncoding(BaseModel):
    """The columns of a table in their order, and the scale of the targets of a regression."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    columns: tuple[Column, ...] = Field(min_length=1)
    target: tuple[str, ...]  # names of the target columns
    client: str | None = None  # name of the column of clients
    target_mean: tuple[FiniteFloat, ...] = ()  # empty: targets are used as they are
    target_std: tuple[_Deviation, ...] = ()

    @property
    def feature_names(self) -> list[str]:
        """Names of the features, in the order of `encode`."""
        return [
            *(c.name for c in self.columns if c.kind in _SCALED),
            *(f"{c.name}={category}" for c in self.columns for category in c.categories),
            *(f"{c.name} is missing" for c in self.columns if c.indicator),
        ]

    def encode(self, x: Tensor, standardise: bool = True) -> Tensor:
        """Return the features [n, features] of raw rows [n, columns]."""
        scaled = [i for i, c in enumerate(self.columns) if c.kind in _SCALED]
        mean = torch.tensor([self.columns[i].mean for i in scaled], dtype=torch.float64)
        std = torch.tensor([self.columns[i].std for i in scaled], dtype=torch.float64)
        numbers = x[:, scaled]
        numbers = torch.where(torch.isnan(numbers), mean, numbers)
        numbers = (numbers - mean) / std if standardise else numbers
        pairs = [(i, k) for i, c in enumerate(self.columns) for k in range(len(c.categories))]
        ones = x[:, [i for i, _ in pairs]] == torch.tensor([k for _, k in pairs], dtype=torch.float64)
        missing = torch.isnan(x[:, [i for i, c in enumerate(self.columns) if c.indicator]])
        return torch.cat([numbers.float(), ones.float(), missing.float()], 1)

    def scale_targets(self, y: Tensor) -> Tensor:
        """Return targets [n, k] on the scale of training."""
        if not self.target_mean:
            return y
        scaled = (y.double() - torch.tensor(self.target_mean).double()) / torch.tensor(self.target_std).double()
        return scaled.float()

    def unscale_outputs(self, outputs: Tensor) -> Tensor:
        """Return outputs of a model [n, k] in the units of the targets."""
        return outputs * torch.tensor(self.target_std) + torch.tensor(self.target_mean) if self.target_mean else outputs

    def read_codes(self, x: Tensor, own: "TableEncoding", name: str) -> Tensor:
        """Return rows that were read with the encoding `own` as rows of this one: columns and categories by name."""
        position = {c.name: i for i, c in enumerate(own.columns)}
        check_names(name, [c.name for c in self.columns], position)
        rows = x if len(self.columns) == len(own.columns) else x[:, [position[c.name] for c in self.columns]]
        for i, column in enumerate(self.columns):
            read = own.columns[position[column.name]]
            if (column.kind == "category") != (read.kind == "category") and "empty" not in (column.kind, read.kind):
                raise CoterieError(
                    f'column "{column.name}" of {name} holds {_PLURAL[read.kind]}, and the model takes '
                    f"{_PLURAL[column.kind]}"
                )
            if i != position[column.name] or read.categories != column.categories:
                rows = copy_table(rows) if rows is x else rows
                rows[:, i] = _recoded(x[:, position[column.name]], read.categories, column.categories)
        return rows


_SCALED = ("number", "boolean", "date")
_PLURAL = {"number": "numbers", "boolean": "booleans", "date": "dates", "category": "categories", "empty": "no values"}


def check_names(name: str, wanted: Sequence[str], present: Sequence[str] | Mapping[str, object]) -> None:
    """Raise CoterieError if a table lacks one of the wanted columns."""
    if absent := [c for c in wanted if c not in present]:
        shown = [f'"{c}"' if c != c.strip() or "," in c else c for c in map(str, present)]
        names = ", ".join(shown[:10]) + (", ..." if len(present) > 10 else "")
        raise CoterieError(f'{name} has no column "{absent[0]}"; its columns are {names}')


def _recoded(codes: Tensor, before: Sequence[str], after: Sequence[str]) -> Tensor:
    """Return positions in the list `before` as positions in `after`; missing values stay missing."""
    if before == after or not before:
        return codes
    position = {category: float(k) for k, category in enumerate(after)}
    lookup = torch.tensor([*(position.get(category, -1.0) for category in before), -1.0], dtype=torch.float64)
    known = torch.where(torch.isnan(codes), 0.0, codes).long()  # -1 is the last entry
    return torch.where(torch.isnan(codes), codes, lookup[known])


# ---- statistics ------------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class ColumnStatistics:
    """Statistics of one column over the training rows of one client; the common encoding is made from them."""

    kind: str
    count: int  # rows with a value
    gaps: bool  # True if a row has no value
    total: float = 0.0  # sum of the values
    squares: float = 0.0  # sum of squared differences from the client's own mean
    categories: tuple[str, ...] = ()  # categories that occur


def measure_column(column: Column, values: NDArray[np.float64]) -> ColumnStatistics:
    """Return the statistics of a column's values; sums are rounded once, so that the order of rows does not matter."""
    present = values[~np.isnan(values)]
    gaps = len(present) < len(values)
    if column.kind == "category":
        codes = np.unique(present[present >= 0]).astype(int)
        return ColumnStatistics("category", len(present), gaps, categories=tuple(column.categories[k] for k in codes))
    if not len(present):
        return ColumnStatistics("empty", 0, gaps)
    total = math.fsum(present)
    squares = math.fsum(np.square(present - total / len(present)))
    return ColumnStatistics(column.kind, len(present), gaps, total, squares)


def measure_rows(encoding: TableEncoding, x: Tensor, rows: NDArray[np.int64]) -> dict[str, ColumnStatistics]:
    """Return the statistics of all columns over these rows, by name."""
    raw = x.numpy()
    return {c.name: measure_column(c, raw[rows, i]) for i, c in enumerate(encoding.columns)}


def measure_targets(names: Sequence[str], y: Tensor, rows: NDArray[np.int64]) -> dict[str, ColumnStatistics]:
    """Return the statistics of targets [n, k] over these rows, by name."""
    raw = y.numpy().astype(np.float64)
    return {name: measure_column(Column(name=name, kind="number"), raw[rows, k]) for k, name in enumerate(names)}


def agree_column(name: str, measured: Sequence[ColumnStatistics], who: Callable[[int], str] = str) -> Column:
    """Return the encoding of a column from the statistics of all clients; the order of clients does not matter.

    `who` names a client in an error message.
    """
    kinds = {m.kind: i for i, m in reversed(list(enumerate(measured))) if m.kind != "empty"}
    if kinds.keys() == {"number", "boolean"}:
        kinds.pop("boolean")
    if len(kinds) > 1:
        (a, i), (b, j) = sorted(kinds.items())[:2]
        raise CoterieError(
            f'column "{name}" holds {_PLURAL[a]} at {who(i)} and {_PLURAL[b]} at {who(j)}; name its kind in features, '
            f"for example {name}:category"
        )
    kind = next(iter(kinds), "empty")
    indicator = any(m.gaps for m in measured)
    if kind == "category":
        categories = sorted({c for m in measured for c in m.categories})
        if len(categories) > MOST_CATEGORIES:
            raise CoterieError(too_many_categories(name, len(categories)))
        column = Column(name=name, kind="category", categories=tuple(categories), indicator=indicator)
        return column if categories else Column(name=name, kind="empty")
    mean, std = pooled_moments([m for m in measured if m.count])
    return Column(name=name, kind=kind, mean=mean, std=std, indicator=indicator and kind != "empty")


def too_many_categories(name: str, number: int) -> str:
    """Return the error message about a column of names, record numbers or free text."""
    return (
        f'column "{name}" holds {number} different texts, and a category has at most {MOST_CATEGORIES}: leave it out '
        "of features, or write numbers (dates as YYYY-MM-DD)"
    )


def pooled_moments(measured: Sequence[ColumnStatistics]) -> tuple[float, float]:
    """Return mean and standard deviation of all clients' values; (0, 1) without values, deviation 1 of a constant."""
    n = sum(m.count for m in measured)
    if n == 0:
        return 0.0, 1.0
    mean = math.fsum(m.total for m in measured) / n
    between = [m.count * (m.total / m.count - mean) ** 2 for m in measured]
    std = math.sqrt(math.fsum([*(m.squares for m in measured), *between]) / n)
    return mean, std if std > _CONSTANT * abs(mean) else 1.0


def agree_encoding(
    encoding: TableEncoding,
    measured: Sequence[Mapping[str, ColumnStatistics]],
    scale_targets: bool,
    who: Callable[[int], str] = str,
) -> TableEncoding:
    """Return the common encoding of the columns of `encoding` from the statistics of all clients."""
    columns = [agree_column(c.name, [m[c.name] for m in measured], who) for c in encoding.columns]
    if all(c.kind == "empty" for c in columns):
        raise CoterieError("no feature column has a value in the training rows")
    mean, std = (), ()
    if scale_targets:
        mean, std = zip(*(pooled_moments([m[name] for m in measured]) for name in encoding.target), strict=True)
    return encoding.model_copy(update={"columns": tuple(columns), "target_mean": mean, "target_std": std})


def own_scale(encoding: TableEncoding, measured: Mapping[str, ColumnStatistics]) -> TableEncoding:
    """Return the encoding with the means and deviations of one client; columns without values keep the common ones."""
    columns = []
    for c in encoding.columns:
        if c.kind in _SCALED and measured[c.name].count:
            mean, std = pooled_moments([measured[c.name]])
            c = c.model_copy(update={"mean": mean, "std": std})
        columns.append(c)
    return encoding.model_copy(update={"columns": tuple(columns)})


def described_encoding(
    name: str, encoding: TableEncoding, scaling: str, x: Tensor, train: NDArray[np.int64]
) -> list[str]:
    """Return sentences about what became of the columns of a table with these raw rows, of which `train` train."""
    count = {kind: sum(c.kind == kind for c in encoding.columns) for kind in ("number", "boolean", "date", "category")}
    kinds = ", ".join(f"{n} of {_PLURAL[kind]}" for kind, n in count.items() if n)
    learnt = "all clients" if scaling == "pooled" else "all clients (means and deviations: of each client)"
    sentences = [
        f"columns of {name}: {kinds}; they become {len(encoding.feature_names)} features, learnt from the training "
        f"rows of {learnt}"
    ]
    if empty := [c.name for c in encoding.columns if c.kind == "empty"]:
        sentences.append(f"no training row of {name} has a value in {', '.join(empty)}, so that gives no feature")
    raw = x.numpy()

    def is_constant(column: int) -> bool:
        values = raw[train, column]
        values = values[~np.isnan(values)]
        return bool((values == values[0]).all())

    scaled = [(i, c) for i, c in enumerate(encoding.columns) if c.kind in _SCALED and not c.indicator]
    if constant := [c.name for i, c in scaled if is_constant(i)]:
        sentences.append(
            f"all training rows of {name} have the same value in {', '.join(constant)}, which tells a model nothing"
        )
    if encoding.target_mean:
        scales = ", ".join(
            f"{t} has mean {m:.4g} and deviation {s:.4g}"
            for t, m, s in zip(encoding.target, encoding.target_mean, encoding.target_std, strict=True)
        )
        sentences.append(
            f"targets of {name} are standardised ({scales}), so errors during training are in units of the deviation; "
            "predictions are in the units of the table (--set normalize=none leaves the targets as they are)"
        )
    return sentences
