"""The data of a federation as one of its hosts sees them: a device has its own data only, the cloud has none."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from coterie.core.context import ClientData, Split
from coterie.data.dataset import Dataset, Ints
from coterie.data.federation import Federation, Part, federate, identity_settings, with_encoding
from coterie.data.settings import PartitionSettings
from coterie.data.table import TableEncoding, measure_rows, measure_targets
from coterie.data.target_types import with_classes
from coterie.data.timeline import Timeline
from coterie.errors import CoterieError
from coterie.federation.protocol.messages import TableAnswer


class DeviceFederation(Federation):
    """A federation of `places` clients of which this host has the data of at most one.

    `own` holds these data as a federation with one client. An `edge` has no public items
    either, because it computes nothing that needs them.
    """

    knows_all_clients: ClassVar[bool] = False

    def __init__(
        self,
        example: Dataset,
        settings: PartitionSettings,
        seed: int,
        places: int,
        own: Federation | None = None,
        edge: bool = False,
    ):
        if settings.public and settings.public_from != "noise" and not edge:
            raise CoterieError("devices with data of their own have no public items in common; set public_from=noise")
        if settings.timeline is not None:
            raise CoterieError("devices with data of their own have timelines of their own (coterie join --timeline)")
        self.dataset, self.settings, self.seed, self.own = example, settings, seed, own
        self.timeline = Timeline({}) if own is None else own.timeline
        self.clients: tuple[int, ...] = tuple(range(places))
        self.named, self.names = False, tuple(map(str, self.clients))
        self.groups: Ints | None = None
        self.notes, self.choices = () if own is None else own.notes, ()
        self.identity: dict[str, Any] = {**identity_settings(settings), "partition": "own", "clients": places}
        self._public_ready: torch.Tensor | None = torch.zeros((0, *example.shape)) if edge else None

    def data(self, client: int, round: int = 1) -> ClientData:
        return replace(self._own().data(0, round), client=client, classes=self.num_classes, public=self.public())

    def test(self, client: int, round: int = 1) -> Split:
        return self._own().test(0, round)

    def official(self) -> Split | None:
        return None

    def sizes(self, part: Part | Literal["all"] = "train", round: int = 1) -> Ints:
        """Return the same size for all clients: that of the own data or, without own data, 1 for every part in use."""
        if self.own is not None:
            size = int(self.own.sizes(part, round)[0])
        else:
            size = 1 if part != "val" or self.settings.val_share > 0 else 0
        return np.full(len(self.clients), size, dtype=np.int64)

    def source(self, client: int) -> Dataset:
        return self.dataset if self.own is None else self.own.source(0)

    def rotation(self, client: int, round: int = 1) -> float:
        return 0.0 if self.own is None else self.own.rotation(0, round)

    def _own(self) -> Federation:
        if self.own is None:
            raise CoterieError("this host has no data of its own")
        return self.own


def example_dataset(
    shape: tuple[int, ...],
    classes: tuple[str, ...],
    kind: str,
    vocab: int | None,
    mean: Any,
    std: Any,
    task: str = "classification",
    targets: int = 1,
    table: TableEncoding | None = None,
) -> Dataset:
    """Return two items of zeros with the shape and type of the devices' data; models are built for them."""
    dtypes = {"float32": torch.float32, "uint8": torch.uint8, "int64": torch.int64, "float64": torch.float64}
    x = torch.zeros((2, *(shape if table is None else (len(table.columns),))), dtype=dtypes[kind])
    is_test = torch.zeros(2, dtype=torch.bool)
    is_class = task in ("classification", "binary")
    y = torch.zeros(2, dtype=torch.int64) if is_class else torch.zeros(2, targets)
    return Dataset("own", x, y, classes, is_test, None, mean, std, vocab, task, table=table)


def only_client(data: Dataset, like: Dataset, settings: PartitionSettings, seed: int) -> Federation:
    """Return a device's data as a federation with one client that keeps a split or an official test part of the data.

    Raises CoterieError if the data do not have the form of `like`, the example of the run.
    """
    if (data.table is None) != (like.table is None):
        here, there = ("a table", "no tables") if data.table is not None else ("no table", "tables")
        raise CoterieError(f"the data here are {here}, the federation's are {there}")
    if like.table is not None:
        data = with_encoding(data, like.table)
    if data.shape != like.shape or (data.x.dtype == torch.int64) != (like.x.dtype == torch.int64):
        raise CoterieError(
            f"the data here are {data.x.dtype} {data.shape}, the federation's are {like.x.dtype} {like.shape}"
        )
    if data.targets != like.targets or (data.y.dtype == torch.int64) != (like.y.dtype == torch.int64):
        raise CoterieError(
            f"the data here have targets for {data.kind} ({data.targets} each), "
            f"the federation's are for {like.kind} ({like.targets} each)"
        )
    # every device normalises alike
    return _one_client(replace(with_classes(data, like), mean=like.mean, std=like.std), settings, seed)


def describe_table(data: Dataset, settings: PartitionSettings, seed: int) -> TableAnswer:
    """Return the statistics of a device's table over its training rows; nothing else of the table leaves the device."""
    if data.table is None:
        raise CoterieError("the federation's data are tables, and the data here are none (CSV or Parquet file)")
    rows = _one_client(data, settings, seed).indices(0, "train").numpy()
    scaled = data.table.target if data.kind == "regression" and settings.normalize == "standard" else ()
    return TableAnswer(
        measure_rows(data.table, data.x, rows) | measure_targets(scaled, data.y, rows),
        tuple(c.name for c in data.table.columns), data.kind, data.classes,
    )  # fmt: skip


def _one_client(data: Dataset, settings: PartitionSettings, seed: int) -> Federation:
    """Return data as a federation with one client that keeps a split or an official test part of the data."""
    pieces: dict[str, Any] = {"partition": "iid", "clients": 1, "public": 0, "min_size": 1, "cap": False}
    if data.part is not None:
        pieces |= {"pool": "merged", "test_from": "given"}
    elif data.is_test.any():
        pieces |= {"pool": "train", "test_from": "official"}
    else:
        pieces |= {"pool": "merged", "test_from": "own"}
    chosen = settings.model_copy(update=pieces | {"short": "redraw"})
    return federate(replace(data, owner=None), chosen, seed, standardise=False)
