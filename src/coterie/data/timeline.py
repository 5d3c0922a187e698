"""Data that change during a run: a timeline maps a client and a round to the samples and labels in force."""

import bisect
import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.data.annotations import PART_WORDS, client_number
from coterie.data.dataset import Dataset, Ints
from coterie.data.partition_spec import parse_scheme
from coterie.errors import CoterieError, unknown


class Change(BaseModel):
    """New data of some clients, relative to the partition. A change replaces earlier changes of these clients."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    round: int = Field(ge=1)  # first round with these data
    clients: tuple[int | str, ...] | None = None  # numbers or names; None: all clients
    samples: tuple[int, ...] | None = (
        None  # numbers in the data set; without `clients`, each client keeps its own among them
    )
    data_of: int | str | None = None  # the client holds the samples of this client of the partition
    labels: tuple[int | str, ...] | None = None  # the client keeps only samples with these labels (numbers or names)
    relabel: dict[str, int | str] | None = None  # label -> label that its samples have instead
    data_size: int | None = None  # samples of the data set that the numbers are for; None: not checked
    rotate: float = 0.0  # degrees by which pictures are rotated, in addition to the partition's rotation

    @model_validator(mode="after")
    def _check(self) -> "Change":
        if self.samples is not None and self.data_of is not None:
            raise ValueError("samples and data_of exclude each other")
        if self.samples is not None and self.clients is not None and len(self.clients) != 1:
            raise ValueError("samples belong to one client; name one in clients, or leave clients out")
        return self


def read_timeline(given: Any) -> Any:
    """Return a timeline without files and arrays: the name of a schedule, or a list of changes.

    `given` is a schedule such as swap_labels(10), a TOML file with tables [[change]], an .npy file or an array with the
    first round of every sample [samples] or its first and last [samples, 2] (0: the end), or a list of changes.
    """
    if isinstance(given, str) and "(" in given and not Path(given).exists():
        return given
    if isinstance(given, str | Path):
        given = _read_file(Path(given))
    if hasattr(given, "ndim"):
        return _of_array(np.asarray(given))
    return given


def parse_timeline(given: Any) -> str | tuple[Change, ...] | None:
    """Check a timeline as it is stored with a run: the name of a schedule, or a list of changes. It reads no file."""
    if given is None:
        return None
    if isinstance(given, str):
        parse_scheme(given, "timeline")
        return given
    if not isinstance(given, list | tuple):
        raise CoterieError(f"timeline = {given!r} is invalid: it must be a file, a schedule or a list of changes")
    changes = []
    for number, one in enumerate(given, 1):
        try:
            changes.append(one if isinstance(one, Change) else Change.model_validate(_plain(one)))
        except ValidationError as e:
            first = e.errors()[0]
            where, why = ".".join(map(str, first["loc"][:1])), first["msg"].removeprefix("Value error, ")
            known = f" (known: {', '.join(Change.model_fields)})" if first["type"] == "extra_forbidden" else ""
            raise CoterieError(f"timeline, change {number}: {f'{where}: ' if where else ''}{why}{known}") from None
    return tuple(changes)


@dataclass(frozen=True)
class DataStage:
    """The data of one client, in force until its next stage."""

    round: int  # first round with these data
    parts: tuple[Ints, Ints, Ints]  # numbers of the train, validation and test samples, ascending
    labels: Ints | None  # [classes] label that samples of each class have; None: their own
    degrees: float  # rotation in addition to the partition's


class Timeline:
    """The stages of every client whose data change."""

    def __init__(self, stages: Mapping[int, Sequence[DataStage]]):
        self._stages = {client: tuple(s) for client, s in stages.items()}
        self._starts = {client: [s.round for s in own] for client, own in self._stages.items()}
        self.rounds: tuple[int, ...] = tuple(sorted({1, *(r for own in self._starts.values() for r in own)}))

    def at(self, client: int, round: int) -> DataStage | None:
        """Return the stage in force; None if the client has the data of the partition. Round 0 is like round 1."""
        at = bisect.bisect_right(self._starts.get(client, []), max(1, round))
        return self._stages[client][at - 1] if at else None

    def in_force(self, round: int) -> dict[int, DataStage]:
        """Return the stages in force by client; clients with the data of the partition are left out."""
        return {client: stage for client in self._stages if (stage := self.at(client, round)) is not None}

    def digest(self) -> bytes:
        """Return a digest of every stage."""
        digest = hashlib.sha256()
        for client, own in sorted(self._stages.items()):
            for stage in own:
                digest.update(f"{client} {stage.round} {stage.degrees!r}".encode())
                for array in (*stage.parts, *(() if stage.labels is None else (stage.labels,))):
                    digest.update(str(len(array)).encode() + np.ascontiguousarray(array, "<i8").tobytes())
        return digest.digest()


def make_timeline(
    given: str | tuple[Change, ...] | None, dataset: Dataset, index: Ints, bounds: Ints, names: tuple[str, ...]
) -> Timeline:
    """Apply the changes to a partition; raise CoterieError if one does not fit the data or leaves a client empty.

    A sample keeps its part: a test sample of the partition is a test sample for every client that gets it.
    """
    if given is None:
        return Timeline({})
    held = _Partition(dataset, index, bounds, names)
    changes = held.schedule(given) if isinstance(given, str) else list(given)
    stages: dict[int, dict[int, DataStage]] = {}
    for number, change in enumerate(changes, 1):
        name = f"timeline {given}" if isinstance(given, str) else f"timeline, change {number}"
        try:
            for client in held.clients(change):
                if change.round in stages.setdefault(client, {}):
                    raise CoterieError(f"client {names[client]} has two changes in round {change.round}")
                stages[client][change.round] = held.stage(client, change)
        except CoterieError as e:
            raise CoterieError(f"{name}: {e}") from None
    return Timeline({client: [own[r] for r in sorted(own)] for client, own in stages.items()})


class _Partition:
    """The samples of each client before any change."""

    def __init__(self, dataset: Dataset, index: Ints, bounds: Ints, names: tuple[str, ...]):
        self.dataset, self.index, self.bounds, self.names = dataset, index, bounds, names
        self.part = np.full(len(dataset), -1, np.int64)  # part of each sample; -1: no client holds it
        self.part[index] = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)) % 3

    def of(self, client: int) -> Ints:
        return self.index[self.bounds[3 * client] : self.bounds[3 * client + 3]]

    def clients(self, change: Change) -> list[int]:
        if change.clients is None:
            return list(range(len(self.names)))
        return [client_number(self.names, c) for c in change.clients]

    def stage(self, client: int, change: Change) -> DataStage:
        """Return the data of a client after a change."""
        samples = self.of(client if change.data_of is None else client_number(self.names, change.data_of))
        if change.data_size not in (None, len(self.part)):
            raise CoterieError(f"it is for {change.data_size} samples, and {self.dataset.name} has {len(self.part)}")
        if change.samples is not None:
            listed = np.unique(np.array(change.samples, np.int64))
            if len(listed) and not 0 <= listed[0] <= listed[-1] < len(self.part):
                raise CoterieError(f"samples are numbered 0 to {len(self.part) - 1}")
            if change.clients is None:
                samples = samples[np.isin(samples, listed)]
            else:
                samples = listed
                if len(unheld := listed[self.part[listed] < 0]):
                    raise CoterieError(f"sample {unheld[0]} belongs to no client of the partition")
        if change.labels is not None:
            kept = [self._label(label) for label in change.labels]
            samples = samples[np.isin(self._classes()[samples], kept)]
        train, val, test = (np.sort(samples[self.part[samples] == p]) for p in range(3))
        for p, held in ((0, train), (2, test)):
            if not len(held):
                raise CoterieError(
                    f"client {self.names[client]} has no {PART_WORDS[p]} samples from round {change.round} on"
                )
        labels = None
        if change.relabel is not None:
            labels = np.arange(len(self.dataset.classes))
            for old, new in change.relabel.items():
                labels[self._label(old)] = self._label(new)
        if change.rotate and not (self.dataset.is_picture and self.dataset.shape[1] == self.dataset.shape[2]):
            raise CoterieError(f"rotate needs square pictures, and items of {self.dataset.name} are not")
        return DataStage(change.round, (train, val, test), labels, change.rotate)

    def _classes(self) -> Ints:
        if not self.dataset.task.classes:
            raise CoterieError(f"labels change only in classification tasks, and {self.dataset.name} has none")
        return self.dataset.y.numpy()

    def _label(self, given: int | str) -> int:
        """Return the number of a class that is given by name or by number."""
        self._classes()
        names = self.dataset.classes
        if isinstance(given, str) and given in names:
            return names.index(given)
        if str(given).isdecimal() and int(given) < len(names):
            return int(given)
        raise unknown("label", str(given), names)

    def schedule(self, name: str) -> list[Change]:
        """Return the changes of a generated schedule."""
        scheme = parse_scheme(name, "timeline")
        start, n = int(scheme["round"]), len(self.names)
        if scheme.name == "move_data":
            return [Change(round=start, clients=(i,), data_of=(i + 1) % n) for i in range(n)]
        if scheme.name == "new_labels":
            if start < 2:
                raise CoterieError(f"timeline {name}: round must be 2 or more, so that some rounds lack the new labels")
            first = [Change(round=1, clients=(i,), labels=self._common(i)) for i in range(n)]
            return [*first, Change(round=start)]
        share = scheme["share"]
        if share > 1 or not (count := int(share * n)):
            raise CoterieError(f"timeline {name}: share must be at most 1 and make at least one of {n} clients change")
        some = tuple(range(count))
        if scheme.name == "rotate":
            return [Change(round=start, clients=some, rotate=scheme["degrees"])]
        pairs = len(self.dataset.classes) // 2
        swapped: dict[str, int | str] = {str(k): k ^ 1 for k in range(2 * pairs)}
        return [Change(round=start, clients=some, relabel=swapped)]

    def _common(self, client: int) -> tuple[int, ...]:
        """Return the more common half of the labels that a client holds."""
        counts = np.bincount(self._classes()[self.of(client)])
        order = np.argsort(-counts, kind="stable")
        return tuple(sorted(int(k) for k in order[: (int((counts > 0).sum()) + 1) // 2]))


def _plain(change: Any) -> Any:
    """Return a change with lists in place of arrays."""
    if not isinstance(change, Mapping):
        return change
    return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in change.items()}


def _read_file(path: Path) -> Any:
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        content = tomllib.loads(path.read_text())
    except OSError as e:
        raise CoterieError(f"the timeline {path} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise CoterieError(
            f"the timeline {path} is not {'an array' if path.suffix == '.npy' else 'TOML'}: {e}"
        ) from None
    if list(content) != ["change"] or not isinstance(content["change"], list):
        raise CoterieError(f"the timeline {path} must consist of tables [[change]]")
    return content["change"]


def _of_array(rounds: Any) -> list[dict[str, Any]]:
    """Return the changes of an array of first rounds [samples], or of first and last rounds [samples, 2]."""
    if rounds.dtype.kind not in "iu" or rounds.ndim > 2 or (rounds.ndim == 2 and rounds.shape[1] != 2):
        raise CoterieError(
            "a timeline of an array has the first round of each sample [samples], or its first and last [samples, 2]"
        )
    first, last = (rounds, np.zeros_like(rounds)) if rounds.ndim == 1 else rounds.T
    starts = sorted({max(1, int(r)) for r in (*np.unique(first), *np.unique(last[last > 0] + 1))})
    held = {r: np.flatnonzero((first <= r) & ((last == 0) | (r <= last))) for r in starts}
    return [{"round": r, "data_size": len(first), "samples": samples.tolist()} for r, samples in held.items()]
