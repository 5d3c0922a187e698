"""Targets of each task: inferred from the data or named by the user, converted and checked.

Classes are int64 [n]. All other targets are float32 [n, k]: numbers, labels (0 or 1), or time and event (survival).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.tasks import task_name
from coterie.data.dataset import Array, Dataset
from coterie.errors import CoterieError

MOST_FLOAT_CLASSES = 20  # floats with more different whole values are numbers, not classes


class Targets(NamedTuple):
    """Checked targets and their task."""

    task: str
    y: Tensor
    classes: tuple[str, ...]  # names of classes or labels


def read_targets(name: str, y: Array, classes: Sequence[str] | None = None, task: str | None = None) -> Targets:
    """Convert targets [n, k] of any type to those of the task; a task of None is inferred."""
    task = infer_task(name, y) if task is None else task_name(task)
    if task in ("classification", "binary"):
        labels, names = _labels(name, y, classes)
        if task == "binary" and len(names) != 2:
            raise CoterieError(f"the task binary needs two classes, and {name} has {len(names)}")
        return Targets(task, labels, names)
    numbers = _numbers(name, y, task)
    if task == "multilabel":
        if not bool(((numbers == 0) | (numbers == 1)).all()):
            raise CoterieError(f"labels of {name} must be 0 or 1 in every column for the task multilabel")
        k = numbers.shape[1]
        if classes is not None and len(classes) != k:
            raise CoterieError(f"{name} has {k} labels per item, but names {len(classes)}")
        return Targets(task, numbers, tuple(map(str, classes if classes is not None else range(k))))
    if task == "count" and not bool(((numbers >= 0) & (numbers == numbers.floor())).all()):
        raise CoterieError(f"targets of {name} must be whole numbers that are not negative for the task count")
    if task == "survival":
        _check_survival(name, numbers)
    return Targets(task, numbers, ())


def targets_like(name: str, y: Array, task: str, classes: Sequence[str], outputs: int) -> Tensor:
    """Convert targets to those of an existing data set; labels are its class names or class numbers."""
    y = y.reshape(len(y), -1)
    if task not in ("classification", "binary"):
        numbers = read_targets(name, y, None, task).y
        if task != "survival" and numbers.shape[1] != outputs:
            raise CoterieError(f"targets of {name} are {numbers.shape[1]} numbers each, and the model gives {outputs}")
        return numbers
    if y.shape[1] != 1:
        raise CoterieError(f"labels of {name} must be one each, but have shape {y.shape[1:]}")
    y = y.astype(np.int64) if y.dtype.kind == "b" else y
    values = [str(v) for v in y[:, 0].tolist()]
    if y.dtype.kind == "f":
        values = [v.removesuffix(".0") for v in values]
    numbers_of = {c: i for i, c in enumerate(classes)}
    if y.dtype.kind not in "US" and not any(c.lstrip("-").isdecimal() for c in classes):
        numbers_of = {str(i): i for i in range(len(classes))}  # the classes have names, and y counts them from 0
    if odd := [v for v in values if v not in numbers_of]:
        some = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        raise CoterieError(f'label "{odd[0]}" of {name} is not among the {len(classes)} classes of the model ({some})')
    return torch.tensor([numbers_of[v] for v in values], dtype=torch.int64)


def infer_task(name: str, y: Array) -> str:
    """Infer the task of targets [n, k]: classes are whole numbers or names; labels are several columns of 0 and 1.

    Floats are classes if they are whole numbers with at most MOST_FLOAT_CLASSES different values.
    """
    if y.shape[1] == 1:
        if y.dtype.kind != "f":
            return "classification"
        if not np.isfinite(y).all():
            raise CoterieError(f"targets of {name} contain values that are not finite numbers")
        few = bool((y == np.floor(y)).all()) and len(np.unique(y)) <= MOST_FLOAT_CLASSES
        return "classification" if few else "regression"
    if y.dtype.kind in "buif" and bool(((y == 0) | (y == 1)).all()):
        if bool((y.sum(1) == 1).all()):
            raise CoterieError(
                f"labels of {name} have exactly one 1 in every row: for classes give the number of the column instead; "
                "if an item may have several labels, set task = multilabel"
            )
        return "multilabel"
    if y.dtype.kind == "f":
        return "regression"
    raise CoterieError(
        f"labels of {name} have shape {y.shape[1:]} each: several columns must be 0 and 1 (multilabel) or need "
        "task = regression; for classes give one number per item"
    )


def target_notes(name: str, y: Array, task: str) -> tuple[str, ...]:
    """Return a note for each inferred property of targets [n, 1] that may be wrong."""
    if y.shape[1] != 1 or y.dtype.kind not in "uifUS":
        return ()
    values = np.unique(y)
    if y.dtype.kind in "US":
        many = len(values) > max(MOST_FLOAT_CLASSES, len(y) // 2)
        return (f"targets of {name} are {len(values)} different texts, each taken for a class",) if many else ()
    if task == "regression" and bool((values == np.floor(values)).all()):
        return (f"targets of {name} are {len(values)} different floats and are taken for numbers (task = regression)",)
    if task != "classification":
        return ()
    notes = []
    if values[0] < 0 and values.tolist() != [-1, 1]:
        notes.append(
            f"targets of {name} contain {values[0]:g}, which is taken for a class; remove these items if it marks "
            "items without a label"
        )
    first = int(values[0]) in (0, 1) and int(values[-1]) - int(values[0]) == len(values) - 1  # 0..k-1 or 1..k
    if len(values) > MOST_FLOAT_CLASSES and (not first or len(y) < 10 * len(values)):
        notes.append(
            f"targets of {name} are {len(values)} different whole numbers and are taken for classes; set "
            "task = regression or task = count if they are numbers, and task = classification if they are classes"
        )
    return tuple(notes)


def with_task(data: Dataset, task: str | None) -> Dataset:
    """Return the data for a different task; classes whose names are numbers can become targets of regression."""
    if task is None:
        return data
    data = replace(data, target_notes=())
    if task_name(task) == data.kind:
        return data
    if {task, data.kind} <= {"classification", "binary"}:
        if len(data.classes) != 2 and task == "binary":
            raise CoterieError(f"the task binary needs two classes, and {data.name} has {len(data.classes)}")
        return replace(data, kind=task)
    if data.kind in ("classification", "binary"):
        try:
            values = np.array([float(c) for c in data.classes])
        except ValueError:
            raise CoterieError(
                f"the task {task} needs numbers, and the classes of {data.name} have names ({data.classes[0]}, ...)"
            ) from None
        numbers = values[data.y.numpy()][:, None]
    else:
        numbers = data.y.numpy().astype(np.float64)
    if task in ("classification", "binary"):
        if data.kind != "regression" or numbers.shape[1] != 1 or not bool((numbers == np.floor(numbers)).all()):
            raise CoterieError(f"the task {task} needs one class per item, and {data.name} is for {data.kind}")
        targets = read_targets(data.name, numbers, None, task)
        return replace(data, y=targets.y, classes=targets.classes, kind=task)
    targets = read_targets(data.name, numbers, None, task)
    return replace(data, y=targets.y, classes=targets.classes, kind=task)


def with_classes(data: Dataset, like: Dataset) -> Dataset:
    """Return the data with the classes or labels of `like`, matched by name; numbers are positions in `like`.

    Labels are never renumbered. Raise CoterieError if the data have a class that `like` does not have.
    """
    if data.classes == like.classes or not like.classes:
        return replace(data, kind=like.kind)
    here, there = (all(c.lstrip("-").isdecimal() for c in d.classes) for d in (data, like))
    if there and not here:
        raise CoterieError(
            f"the classes of the data here have names ({_first(data.classes)}), and the federation has "
            f"{len(like.classes)} numbered classes; name the classes at the cloud (--classes {_first(data.classes)})"
        )
    position = {str(i) if here and not there else c: i for i, c in enumerate(like.classes)}
    used = data.classes if data.y.dim() > 1 else [data.classes[i] for i in sorted(set(data.y.tolist()))]
    if odd := [c for c in used if c not in position]:
        raise CoterieError(
            f'the data here have the class "{odd[0]}", which is not among the {len(like.classes)} classes of the '
            f"federation ({_first(like.classes)})"
        )
    numbers = torch.tensor([position.get(c, -1) for c in data.classes], dtype=torch.int64)
    y = data.y[:, numbers.argsort()] if data.y.dim() > 1 else numbers[data.y]
    return replace(data, y=y, classes=like.classes, kind=like.kind)


def _first(names: Sequence[str]) -> str:
    return ",".join(names[:5]) + (",..." if len(names) > 5 else "")


def _labels(name: str, y: Array, classes: Sequence[str] | None) -> tuple[Tensor, tuple[str, ...]]:
    if y.shape[1] != 1:
        raise CoterieError(f"labels of {name} must be one number each, but have shape {y.shape[1:]}")
    y = y[:, 0]
    if y.dtype.kind in "US":
        names, y = np.unique(y.astype(str), return_inverse=True)
        order = tuple(map(str, names if classes is None else classes))
        if odd := [n for n in names if n not in order]:
            raise CoterieError(f'label "{odd[0]}" of {name} is not among its {len(order)} classes ({_first(order)})')
        numbers = np.array([order.index(n) for n in names], np.int64)
        return torch.from_numpy(numbers[y]), order
    if y.dtype.kind not in "buif" or (y.dtype.kind == "f" and not (np.isfinite(y).all() and (y == np.floor(y)).all())):
        raise CoterieError(f"labels of {name} must be whole numbers or names")
    y = y.astype(np.int64)
    if classes is not None:
        if y.min() < 0 or y.max() >= len(classes):
            raise CoterieError(
                f"labels of {name} run from {y.min()} to {y.max()}, but there are {len(classes)} classes"
            )
        return torch.from_numpy(y), tuple(map(str, classes))
    values, compact = np.unique(y, return_inverse=True)
    return torch.from_numpy(compact.astype(np.int64)), tuple(map(str, values))


def _numbers(name: str, y: Array, task: str) -> Tensor:
    if y.dtype.kind not in "buif":
        raise CoterieError(f"targets of {name} must be numbers for the task {task}")
    numbers = torch.from_numpy(y.astype(np.float32))
    if not bool(numbers.isfinite().all()):
        raise CoterieError(f"targets of {name} contain values that are not finite numbers")
    return numbers


def _check_survival(name: str, y: Tensor) -> None:
    if y.shape[1] != 2:
        raise CoterieError(f"targets of {name} must be two numbers each, time and event, for the task survival")
    time, event = y.T
    if not bool((time >= 0).all()):
        raise CoterieError(f"times of {name} must not be negative")
    if not bool(((event == 0) | (event == 1)).all()):
        raise CoterieError(f"events of {name} must be 0 (not observed) or 1 (happened)")
    if not bool(event.any()):
        raise CoterieError(f"{name} has no event; the task survival needs at least one")
