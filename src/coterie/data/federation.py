"""A federation of clients, each with train, validation and test samples, stored as one index array and offsets."""

import hashlib
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.context import ClientData, Split
from coterie.core.rng import torch_rng
from coterie.core.tasks import Task
from coterie.data.annotations import PART_WORDS, client_number
from coterie.data.dataset import Dataset, Ints
from coterie.data.features import LARGEST_STORE, SampleFeatures
from coterie.data.natural import NATURAL
from coterie.data.partition import deal
from coterie.data.scale import check_unit, standardised, unscaled_items, unscaled_targets
from coterie.data.settings import PartitionSettings
from coterie.data.split import deal_official_test, draw_grouped_parts, draw_parts, hold_out_public
from coterie.data.table import (
    TableEncoding,
    agree_encoding,
    described_encoding,
    measure_rows,
    measure_targets,
    own_scale,
)
from coterie.data.timeline import make_timeline
from coterie.errors import CoterieError

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")
DEFAULT_CLIENTS = 20
CACHE_BYTES = 256 * 2**20  # cache of prepared tensors per process; small federations are prepared only once


class Federation:
    """The clients and their samples. Read-only: the tensors it returns are shared and must not be modified."""

    knows_all_clients: ClassVar[bool] = True  # False on a host that has the data of one client, or none

    def __init__(
        self,
        dataset: Dataset,
        settings: PartitionSettings,
        seed: int,
        index: Ints,
        bounds: Ints,
        public: Ints,
        official: Ints | None,
        rotations: NDArray[np.float64] | None,
        names: tuple[str, ...] | None = None,
        test_from: str = "own",
    ):
        self.dataset, self.settings, self.seed = dataset, settings, seed
        self._test_from = test_from
        self.notes: tuple[str, ...] = ()  # warnings about the data, one sentence each
        self.choices: tuple[str, ...] = ()  # automatic choices, one sentence each
        self.client_tables: tuple[
            TableEncoding, ...
        ] = ()  # encoding per client, if each has its own (scaling = client)
        self._index = torch.from_numpy(index)  # samples by client, then part, then sample number
        self._bounds = bounds  # [3 * clients + 1] into index: train, val, test of client 0, train of client 1, ...
        self._public = torch.from_numpy(public)
        self._official = None if official is None else torch.from_numpy(official)
        self._rotations = rotations  # degrees per client
        self.clients: tuple[int, ...] = tuple(range(len(bounds) // 3))
        self.named = names is not None  # True if the data name the clients
        self.names: tuple[str, ...] = names or tuple(map(str, self.clients))
        self.groups: Ints | None = None  # true group of each client; 0: not rotated
        if rotations is not None:
            self.groups = np.unique(rotations, return_inverse=True)[1].astype(np.int64)
        self.timeline = make_timeline(settings.timeline, dataset, index, bounds, self.names)
        self.identity: dict[str, Any] = self._identity()
        self._cache: dict[tuple[int, str, int], Split] = {}  # by client, part and first round of the stage
        self._cached = 0
        self._public_ready: Tensor | None = None
        self.features: SampleFeatures | None = None  # given to models in place of items
        self._official_ready: Split | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dataset.shape

    @property
    def task(self) -> Task:
        return self.dataset.task

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if targets are not classes."""
        return self.task.classes

    def data(self, client: int, round: int = 1) -> ClientData:
        """Return the data that the hooks of this client may use in a round."""
        train, val = self._split(client, "train", round), self._split(client, "val", round)
        return ClientData(client, train, val, self.num_classes, self.public())

    def test(self, client: int, round: int = 1) -> Split:
        return self._split(client, "test", round)

    def public(self) -> Tensor | None:
        """Return the unlabelled items that the server and all clients have, or None."""
        if not self.settings.public:
            return None
        if self._public_ready is None:
            if self.settings.public_from == "noise":
                shape = (self.settings.public, *self.shape)
                self._public_ready = torch.randn(shape, generator=torch_rng(self.seed, "public", "noise"))
            else:
                self._public_ready = self._features_of(self._public, self._public_items)
        return self._public_ready

    def official(self) -> Split | None:
        """Return the official test part, or None if it was merged into the pool or does not exist."""
        if self._official is None or len(self._official) == 0:
            return None
        if self._official_ready is None:
            x = self.dataset.ready(self._official, self.settings.normalize)
            self._official_ready = Split(x, self.dataset.y[self._official])
        return self._official_ready

    def number(self, client: int | str) -> int:
        """Return the number of a client that is given by number or by name."""
        return client_number(self.names, client)

    def indices(self, client: int, part: Part, round: int = 1) -> Tensor:
        """Return the indices of the samples in the data set, ascending."""
        if not 0 <= client < len(self.clients):
            raise CoterieError(f"unknown client {client}; clients are numbered 0 to {len(self.clients) - 1}")
        if (stage := self.timeline.at(client, round)) is not None:
            return torch.from_numpy(stage.parts[PARTS.index(part)])
        at = 3 * client + PARTS.index(part)
        return self._index[self._bounds[at] : self._bounds[at + 1]]

    def size(self, client: int, part: Part = "train", round: int = 1) -> int:
        return len(self.indices(client, part, round))

    def sizes(self, part: Part | Literal["all"] = "train", round: int = 1) -> Ints:
        """Return the number of samples per client [clients]."""
        each = np.diff(self._bounds).reshape(-1, 3)
        for client, stage in self.timeline.in_force(round).items():
            each[client] = [len(p) for p in stage.parts]
        return each.sum(axis=1) if part == "all" else each[:, PARTS.index(part)]

    def label_counts(self, part: Part | Literal["all"] = "train", round: int = 1) -> Ints:
        """Return the number of samples per client and class (or target range) [clients, classes]."""
        strata, names = self.dataset.strata
        row = np.repeat(np.arange(len(self._bounds) - 1), np.diff(self._bounds))  # 3 * client + part
        picked = slice(None) if part == "all" else row % 3 == PARTS.index(part)
        cell = row[picked] // 3 * len(names) + strata[self._index.numpy()[picked]]
        counts = np.bincount(cell, minlength=len(self.clients) * len(names)).reshape(-1, len(names))
        for client, stage in self.timeline.in_force(round).items():
            held = strata[np.concatenate(stage.parts) if part == "all" else stage.parts[PARTS.index(part)]]
            counts[client] = np.bincount(held if stage.labels is None else stage.labels[held], minlength=len(names))
        return counts

    def rotation(self, client: int, round: int = 1) -> float:
        """Return the degrees by which the pictures of this client are rotated."""
        base = 0.0 if self._rotations is None else float(self._rotations[client])
        stage = self.timeline.at(client, round)
        return base if stage is None else (base + stage.degrees) % 360

    def source(self, client: int) -> Dataset:
        """Return the data set that this client's items come from."""
        table = self.client_tables[client] if self.client_tables else self.dataset.table
        return self.dataset if table is self.dataset.table else replace(self.dataset, table=table)

    def _split(self, client: int, part: Part, round: int) -> Split:
        stage = self.timeline.at(client, round)
        key = (client, part, 0 if stage is None else stage.round)
        split = self._cache.get(key)
        if split is None:
            index, s = self.indices(client, part, round), self.settings

            def items(rows: Tensor) -> Tensor:
                return self.source(client).ready(rows, s.normalize, self.rotation(client, round), s.rotate_interp)

            x, y = self._features_of(index, items), self.dataset.y[index]
            split = Split(x, y if stage is None or stage.labels is None else torch.from_numpy(stage.labels)[y])
            size = x.numel() * x.element_size()
            if self._cached + size <= CACHE_BYTES:
                self._cache[key] = split
                self._cached += size
        return split

    def _public_items(self, rows: Tensor) -> Tensor:
        return self.dataset.ready(rows, self.settings.normalize)

    def _features_of(self, index: Tensor, items: Callable[[Tensor], Tensor]) -> Tensor:
        return items(index) if self.features is None else self.features.of(index, items)

    def with_features(self, compute: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> "Federation | None":
        """Return this federation with features in place of items; None if a sample's item depends on its client."""
        size = 4 * len(self.dataset) * prod(shape)
        if type(self) is not Federation or self._rotations is not None or self.client_tables:
            return None
        if self.settings.timeline is not None or size > LARGEST_STORE:
            return None
        other = copy(self)
        other._cache, other._cached, other._public_ready = {}, 0, None
        other.features = SampleFeatures(compute, len(self.dataset), shape)
        return other

    def compute_features(self) -> None:
        """Compute the features of all clients' samples now, so that processes that are forked later share them."""
        if self.features is not None:
            self.public()
            for client in self.clients:
                for part in PARTS:
                    self._split(client, part, 1)

    def _identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        digest.update(self.dataset.digest.encode())
        for array in (self._index.numpy(), self._bounds, self._public.numpy()):
            digest.update(str(array.shape).encode() + np.ascontiguousarray(array, "<i8").tobytes())
        if self.settings.timeline is not None:
            digest.update(self.timeline.digest())
        return {
            **identity_settings(self.settings),
            "test_from": self._test_from,
            "partition": str(self.settings.scheme),
            "clients": len(self.clients),
            "seed": self.seed,
            "data": self.dataset.name,
            "samples": len(self.dataset),
            "items": self.dataset.digest,
            "dealt": len(self._index),
            "sha256": digest.hexdigest(),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}, "_cached": 0, "_public_ready": None, "_official_ready": None}


def identity_settings(settings: PartitionSettings) -> dict[str, Any]:
    """Return the settings in the identity of a partition; timeline and scaling only if they are not the default."""
    without = {name for name in ("timeline", "scaling") if getattr(settings, name) in (None, "pooled")}
    return settings.model_dump(mode="json", exclude=without)


def as_given(settings: PartitionSettings, dataset: Dataset, keep_test: bool) -> PartitionSettings:
    """Return the settings; values that the user left open are taken from the data.

    Client ids mean a natural partition. With `keep_test`, an official test part stays one.
    """
    update: dict[str, Any] = {}
    given = settings.model_fields_set
    if dataset.owner is not None and "partition" not in given:
        update["partition"] = "natural"
    has_test = dataset.part is None and bool(dataset.is_test.any())
    if keep_test and has_test and not given & {"pool", "test_from", "test_share"}:
        update |= {"pool": "train", "test_from": "official"}
    return settings.model_copy(update=update)


def like_recorded(settings: PartitionSettings, recorded: PartitionSettings) -> PartitionSettings:
    """Fill in the settings that the user left open and that data can decide with those of a run."""
    names = {"partition", "pool", "test_from"} - settings.model_fields_set
    return settings.model_copy(update={k: getattr(recorded, k) for k in names})


def federate(dataset: Dataset, settings: PartitionSettings, seed: int, standardise: bool = True) -> Federation:
    """Divide the samples among clients and split each client's samples; a pure function of its arguments.

    Float items that are out of scale are standardised on training samples, or only noted without `standardise`.
    """
    if settings.normalize == "unit":
        check_unit(dataset)
    labels, names = dataset.strata
    is_test = dataset.is_test.numpy()
    scheme = settings.scheme
    if scheme.name not in ("iid", "natural") and not dataset.task.can_deal:
        raise CoterieError(
            f"partition {scheme} deals by classes or ranges of one target, and {dataset.name} is for {dataset.kind}; "
            "take iid or natural"
        )
    test_from = _test_from(dataset, settings)
    pool = np.arange(len(dataset)) if settings.pool == "merged" else np.flatnonzero(~is_test)
    official = None if settings.pool == "merged" else np.flatnonzero(is_test)
    pool, official, public = hold_out_public(pool, official, settings, seed)

    n = settings.clients or DEFAULT_CLIENTS
    rotations = _rotations(dataset, n, int(scheme["K"])) if scheme.name == "rotate" else None
    owner = None if dataset.owner is None else dataset.owner.numpy()[pool]
    client = deal(labels[pool], owner, len(names), n, settings, seed)
    pool, client = pool[client >= 0], client[client >= 0]

    client_names = _names(dataset, pool, client) if scheme.name == "natural" else None
    part = _parts(dataset, settings, test_from, pool, client, seed, client_names)
    if test_from == "official" and official is not None:
        if scheme.name == "natural":
            test_client = _owned(dataset, pool, client)[dataset.owner.numpy()[official]]  # type: ignore[union-attr]  # natural
            dealt, test_client = np.flatnonzero(test_client >= 0), test_client[test_client >= 0]
        else:
            dealt, test_client = deal_official_test(client, labels[pool], labels[official], len(names), seed)
        pool, client = np.concatenate([pool, official[dealt]]), np.concatenate([client, test_client])
        part = np.concatenate([part, np.full(len(dealt), 2)])
    n = int(client.max()) + 1
    unused = (
        []
        if dataset.owner is None or scheme.name == "natural" or dataset.name in NATURAL
        else [
            f"the clients that {dataset.name} names are not used: partition = {scheme} divides its samples anew "
            "(partition = natural keeps them)"
        ]
    )
    notes, choices = [*unused, *dataset.notes, *dataset.target_notes, *_left_out(dataset, client_names)], []
    train = np.sort(pool[part == 0])
    order = np.lexsort((pool, 3 * client + part))
    bounds = np.concatenate([[0], np.cumsum(np.bincount(3 * client + part, minlength=3 * n))])
    tables: tuple[TableEncoding, ...] = ()
    if dataset.table is not None:
        rows = [pool[order][bounds[3 * i] : bounds[3 * i + 1]] for i in range(n)]  # training rows of each client
        if standardise:
            dataset = learn_table(dataset, rows, settings.normalize == "standard")
            assert dataset.table is not None
            choices += described_encoding(dataset.name, dataset.table, settings.scaling, dataset.x, train)
        if settings.scaling == "client":
            tables = tuple(own_scale(dataset.table, measure_rows(dataset.table, dataset.x, r)) for r in rows)  # type: ignore[arg-type]  # a table
    elif settings.normalize == "standard" and standardise:
        dataset, sentence = standardised(dataset, train)
        choices += [sentence] if sentence else []
    elif settings.normalize == "standard":
        notes += [sentence] if (sentence := unscaled_items(dataset, train)) else []
    if dataset.table is None or not dataset.table.target_mean:
        notes += [sentence] if (sentence := unscaled_targets(dataset, train)) else []
    if test_from != "own":
        _check_parts(np.bincount(3 * client + part, minlength=3 * n).reshape(n, 3), client_names)
        _check_groups(dataset, pool, client, part, client_names)
    federation = Federation(
        dataset, settings, seed, pool[order], bounds, public, official, rotations, client_names, test_from
    )
    federation.notes, federation.choices, federation.client_tables = tuple(notes), tuple(choices), tables
    return federation


def learn_table(dataset: Dataset, rows: Sequence[Ints], standardise: bool) -> Dataset:
    """Return a table with the encoding that its clients agree on; `rows` are the training rows of each client."""
    assert dataset.table is not None
    scales = standardise and dataset.kind == "regression"
    names = dataset.table.target if scales else ()
    measured = [
        {**measure_rows(dataset.table, dataset.x, r), **measure_targets(names, dataset.y, r)} for r in rows
    ]  # fmt: skip
    return with_encoding(dataset, agree_encoding(dataset.table, measured, scales))


def with_encoding(dataset: Dataset, encoding: TableEncoding) -> Dataset:
    """Return a table with this encoding: its categories are numbered and its targets scaled accordingly."""
    assert dataset.table is not None
    x = encoding.read_codes(dataset.x, dataset.table, dataset.name)
    return replace(dataset, x=x, y=encoding.scale_targets(dataset.y), table=encoding)


def _left_out(dataset: Dataset, kept: tuple[str, ...] | None) -> list[str]:
    """Return a note about natural clients that do not take part."""
    if kept is None or dataset.owner is None:
        return []
    all_names = dataset.client_names or tuple(map(str, range(int(dataset.owner.max()) + 1)))
    present, taking_part = np.unique(dataset.owner.numpy()), set(kept)
    if not (missing := [int(i) for i in present if all_names[i] not in taking_part]):
        return []
    names = ", ".join(all_names[i] for i in missing[:5]) + (", ..." if len(missing) > 5 else "")
    samples = int(torch.isin(dataset.owner, torch.tensor(missing)).sum())
    return [
        f"{len(missing)} of {len(present)} clients of {dataset.name} with {samples} samples are left out ({names}): "
        "they have fewer than min_size samples, or there are more than `clients`"
    ]


def _test_from(dataset: Dataset, settings: PartitionSettings) -> str:
    """Return the source of test samples; raise CoterieError if the data do not have it."""
    asked = settings.test_from
    if asked is None:
        given = dataset.part is not None and settings.pool == "merged"
        return "given" if given else "own"
    if asked == "official" and not dataset.is_test.any():
        raise CoterieError(f"test_from = official needs an official test part, and {dataset.name} has none")
    if asked == "given" and dataset.part is None:
        raise CoterieError(
            f"test_from = given needs data with a split (an array of train, val and test), and {dataset.name} has none"
        )
    return asked


def _parts(
    dataset: Dataset,
    settings: PartitionSettings,
    test_from: str,
    pool: Ints,
    client: Ints,
    seed: int,
    names: tuple[str, ...] | None,
) -> Ints:
    """Return 0 (train), 1 (validation) or 2 (test) for each sample of the pool."""
    strata = dataset.strata[0][pool]
    group = None if dataset.group is None else dataset.group.numpy()[pool]
    if group is not None and names is None:
        raise CoterieError(
            f"{dataset.name} has groups of items that must stay together, and partition {settings.scheme} would divide "
            "them among clients; take natural, or data without groups"
        )

    def draw(own_test: bool, where: Ints | slice) -> Ints:
        if group is None or names is None:
            return draw_parts(client[where], strata[where], settings, own_test, seed)
        return draw_grouped_parts(client[where], strata[where], group[where], settings, own_test, seed, names)

    if test_from != "given" or dataset.part is None:
        return draw(test_from == "own", slice(None))
    part = dataset.part.numpy()[pool].copy()
    if settings.val_share and not (part == 1).any() and (rest := np.flatnonzero(part == 0)).size:
        part[rest] = draw(False, rest)  # the split has no validation part
    return part


def _names(dataset: Dataset, pool: Ints, client: Ints) -> tuple[str, ...]:
    """Return the names that the data give to the clients."""
    assert dataset.owner is not None
    first = np.unique(client, return_index=True)[1]
    owner = dataset.owner.numpy()[pool][first].tolist()
    return tuple(str(i) if dataset.client_names is None else dataset.client_names[i] for i in owner)


def _owned(dataset: Dataset, pool: Ints, client: Ints) -> Ints:
    """Return the client number of each owner in the data; -1 if the owner is left out."""
    assert dataset.owner is not None
    number = np.full(int(dataset.owner.max()) + 1, -1, np.int64)
    number[dataset.owner.numpy()[pool]] = client
    return number


def _check_groups(dataset: Dataset, pool: Ints, client: Ints, part: Ints, names: tuple[str, ...] | None) -> None:
    """Raise CoterieError if the split of the data divides a group."""
    if dataset.group is None or names is None:
        return
    group = dataset.group.numpy()[pool]
    code = client * (int(group.max()) + 1) + group
    divided = np.intersect1d(code[part == 2], code[part != 2])
    if divided.size:
        name = names[int(divided[0]) // (int(group.max()) + 1)]
        raise CoterieError(f"a group of client {name} has both test and other samples in the split of the data")


def _check_parts(sizes: Ints, names: tuple[str, ...] | None) -> None:
    """Raise CoterieError if a client has no training or no test samples; sizes is [clients, 3]."""
    for part in (0, 2):
        if (empty := np.flatnonzero(sizes[:, part] == 0)).size:
            name = str(empty[0]) if names is None else names[empty[0]]
            raise CoterieError(
                f"client {name} has no {PART_WORDS[part]} samples in the split of the data; take test_from = own"
            )


def _rotations(dataset: Dataset, n: int, K: int) -> NDArray[np.float64]:
    """Return degrees per client: for r = 1..K-1 the r-th n//K clients are rotated by 360 r / K, the others not."""
    if not dataset.is_picture or dataset.shape[1] != dataset.shape[2]:
        raise CoterieError(f"partition rotate needs square pictures, and items of {dataset.name} are {dataset.shape}")
    if n < K:
        raise CoterieError(f"rotate({K}) makes {K} groups and needs at least as many clients, but clients = {n}")
    group = np.arange(n) // (n // K) + 1
    return np.where(group < K, 360.0 * group / K, 0.0)


__all__ = ["PARTS", "Federation", "Part", "PartitionSettings", "federate"]
