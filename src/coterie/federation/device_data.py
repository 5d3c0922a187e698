"""The data of a federation as one of its hosts sees them: a device has its own data only, the cloud has none."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from coterie.core.context import ClientData, Split
from coterie.data.dataset import Dataset, Ints
from coterie.data.federation import Federation, Part, federate, identity_settings
from coterie.data.settings import PartitionSettings
from coterie.data.target_types import with_classes
from coterie.data.timeline import Timeline
from coterie.errors import CoterieError


class DeviceFederation(Federation):
    """A federation of `places` clients of which this host has the data of at most one.

    `own` holds these data as a federation with one client. An `edge` has no public items
    either, because it computes nothing that needs them.
    """

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
        return self.dataset if self.own is None else self.own.dataset

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
) -> Dataset:
    """Return two items of zeros with the shape and type of the devices' data; models are built for them."""
    x = torch.zeros((2, *shape), dtype={"float32": torch.float32, "uint8": torch.uint8, "int64": torch.int64}[kind])
    is_test = torch.zeros(2, dtype=torch.bool)
    is_class = task in ("classification", "binary")
    y = torch.zeros(2, dtype=torch.int64) if is_class else torch.zeros(2, targets)
    return Dataset("own", x, y, classes, is_test, None, mean, std, vocab, task)


def only_client(data: Dataset, like: Dataset, settings: PartitionSettings, seed: int) -> Federation:
    """Return a device's data as a federation with one client that keeps a split or an official test part of the data.

    Raises CoterieError if the data do not have the form of `like`, the example of the run.
    """
    if data.shape != like.shape or (data.x.dtype == torch.int64) != (like.x.dtype == torch.int64):
        raise CoterieError(
            f"the data here are {data.x.dtype} {data.shape}, the federation's are {like.x.dtype} {like.shape}"
        )
    if data.targets != like.targets or (data.y.dtype == torch.int64) != (like.y.dtype == torch.int64):
        raise CoterieError(
            f"the data here have targets for {data.kind} ({data.targets} each), "
            f"the federation's are for {like.kind} ({like.targets} each)"
        )
    pieces: dict[str, Any] = {"partition": "iid", "clients": 1, "public": 0, "min_size": 1, "cap": False}
    if data.part is not None:
        pieces |= {"pool": "merged", "test_from": "given"}
    elif data.is_test.any():
        pieces |= {"pool": "train", "test_from": "official"}
    else:
        pieces |= {"pool": "merged", "test_from": "own"}
    aligned = replace(
        with_classes(data, like), mean=like.mean, std=like.std, owner=None
    )  # every device normalises alike
    return federate(aligned, settings.model_copy(update=pieces | {"short": "redraw"}), seed, standardise=False)
