"""A data set in memory: items, labels, the official test part and, if the data name them, the natural clients."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.rng import torch_rng
from coterie.core.tasks import Task, make
from coterie.data.on_disk import contiguous_parts
from coterie.data.rotation import Interp, rotate
from coterie.data.table import TableEncoding
from coterie.errors import CoterieError

Array = NDArray[Any]
Ints = NDArray[np.int64]
InputScale = Literal["standard", "unit", "none"]
SUBSET = r"^[1-9]\d*(\+[1-9]\d*)?$"  # N samples, or N+M training and test samples


@dataclass(frozen=True)
class Dataset:
    """Items and targets of a data set.

    Pictures have their channels first and stay bytes in memory; floats and token ids are stored as the model takes
    them.
    """

    name: str
    # uint8 [n, C, H, W] pictures | float32 [n, ...] pictures, signals [n, C, T], vectors | int64 [n, L] text |
    # float64 [n, columns] rows of a table (table.py)
    x: Tensor
    y: Tensor  # classes: int64 [n]; other targets: float32 [n, k]
    classes: tuple[str, ...]  # names of the classes or labels; empty if targets are numbers
    is_test: Tensor  # bool [n], the official test part
    owner: Tensor | None = None  # int64 [n], the natural client of each item
    mean: tuple[float, ...] | None = (
        None  # mean per channel of the official training part; bytes are divided by 255 first
    )
    std: tuple[float, ...] | None = (
        None  # standard deviation per channel; None, as for the mean: items are not standardised
    )
    vocab: int | None = None  # upper bound of token ids, exclusive
    kind: str = "classification"  # name of the task, see coterie.core.tasks
    part: Tensor | None = None  # int64 [n], the split of the data themselves: 0 train, 1 validation, 2 test
    group: Tensor | None = None  # int64 [n], group of each item; a split never divides a group (windows of a recording)
    client_names: tuple[str, ...] | None = None  # client names, indexed by the values of owner
    notes: tuple[str, ...] = ()  # sentences about items that were read in a way that may not be meant
    target_notes: tuple[str, ...] = ()  # such sentences about targets; empty if the task is named
    table: TableEncoding | None = None  # columns of a table and, once it is learnt, their encoding

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one item as the model sees it."""
        return tuple(self.x.shape[1:]) if self.table is None else (len(self.table.feature_names),)

    @property
    def targets(self) -> int:
        """Number of target values per item; a class counts as one."""
        return 1 if self.y.dim() == 1 else self.y.shape[1]

    @cached_property
    def task(self) -> Task:
        if self.kind in ("classification", "binary"):
            return make(self.kind, len(self.classes))
        return make(self.kind, 1 if self.kind == "survival" else self.targets)

    @cached_property
    def strata(self) -> tuple[Ints, tuple[str, ...]]:
        """Class or target range of each item [n], and their names; items are dealt out and split evenly by them."""
        strata, names = self.task.strata(self.y)
        return strata, self.classes if self.task.classes else names

    @property
    def is_picture(self) -> bool:
        return self.x.dim() == 4

    @cached_property
    def digest(self) -> str:
        """Hash of items and labels."""
        digest = hashlib.blake2b(digest_size=16)
        for t in (self.x, self.y):
            digest.update(f"{t.dtype} {tuple(t.shape)}".encode())
            for part in contiguous_parts(t):
                digest.update(part.numpy().data)
        if self.table is not None:
            digest.update(self.table.model_dump_json().encode())
        return digest.hexdigest()

    def ready(
        self, index: Tensor, normalize: InputScale = "standard", degrees: float = 0.0, interp: Interp = "bilinear"
    ) -> Tensor:
        """Return items as the model takes them: gathered, rotated by `degrees`, scaled to 0..1 and standardised."""
        x = self.x.index_select(0, index)
        if self.table is not None:
            return self.table.encode(x, normalize == "standard")
        return prepare_items(x, normalize, self.mean, self.std, degrees, interp)

    def subset(self, n: int, test: int | None = None) -> "Dataset":
        """Return a data set of n items, the same ones on every call; training and test parts keep their shares.

        With `test`, n + test items are drawn from the training part, and the last `test` of them are the official test
        part.
        """
        train = (~self.is_test).nonzero().flatten()
        is_test = self.is_test.clone()
        if test is not None:
            if n + test > len(train):
                raise CoterieError(f"subset = {n}+{test} is more than the {len(train)} training samples of {self.name}")
            keep = _draw_fixed(train, n + test, self.name)
            is_test[keep[n:]] = True
        elif n >= len(self):
            return self
        else:
            tests = self.is_test.nonzero().flatten()
            n_test = round(n * len(tests) / len(self))
            keep = torch.cat([_draw_fixed(part, k, self.name) for part, k in ((train, n - n_test), (tests, n_test))])
        name = f"{self.name}[{n}]" if test is None else f"{self.name}[{n}+{test}]"
        return replace(self, name=name, is_test=is_test).take(keep.sort().values)

    def take(self, index: Tensor) -> "Dataset":
        """Return a data set of these items."""
        owner, part, group = (None if t is None else t[index] for t in (self.owner, self.part, self.group))
        return replace(
            self, x=self.x[index], y=self.y[index], is_test=self.is_test[index], owner=owner, part=part, group=group
        )


def subset_size(subset: int | str) -> int:
    """Return the number of samples of a subset N or N+M."""
    return sum(map(int, str(subset).split("+")))


def smaller_subset(subset: int | str | None, most: int) -> int | str:
    """Return a subset of at most this many samples, with the same share of test samples if it is N+M."""
    if subset is None or isinstance(subset, int):
        return min(subset or most, most)
    train, total = int(subset.partition("+")[0]), subset_size(subset)
    kept = min(most, total) * train // total
    return f"{kept}+{min(most, total) - kept}"


def prepare_items(
    x: Tensor,
    normalize: InputScale,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    degrees: float = 0.0,
    interp: Interp = "bilinear",
) -> Tensor:
    """Turn raw items into items as the model takes them; floats are changed in place."""
    if x.dtype == torch.int64:
        return x
    is_bytes = x.dtype == torch.uint8
    if degrees:  # before standardising, so that the corners filled with zero are black
        x = rotate(x, degrees, interp)
    if is_bytes:
        x = x.float() if normalize == "none" else x.float().div_(255)
    if normalize == "standard" and mean is not None and std is not None:
        tail = (1,) * (x.dim() - 2)
        x = x.sub_(torch.tensor(mean).view(-1, *tail)).div_(torch.tensor(std).view(-1, *tail))
    return x


def _draw_fixed(items: Tensor, k: int, name: str) -> Tensor:
    return items[torch.randperm(len(items), generator=torch_rng(0, "subset", name, len(items)))[:k]]
