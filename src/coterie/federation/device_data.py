"""A federation as one of its hosts sees it: a device has its own data and no others', the cloud has none at all."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from coterie.core.method import ClientData, Split
from coterie.data.dataset import Dataset, Ints
from coterie.data.federation import Federation, Part, federate
from coterie.data.settings import PartitionSettings
from coterie.errors import CoterieError


class DeviceFederation(Federation):
    """`places` clients, of whom at most one is here: `own` holds its data as the only client of a small federation.

    With `edge` not even public items are here: an edge computes nothing that needs them.
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
        self.dataset, self.settings, self.seed, self.own = example, settings, seed, own
        self.clients: tuple[int, ...] = tuple(range(places))
        self.named, self.names = False, tuple(map(str, self.clients))
        self.groups: Ints | None = None
        self.identity: dict[str, Any] = {**settings.model_dump(mode="json"), "partition": "own", "clients": places}
        self._public_ready: torch.Tensor | None = torch.zeros((0, *example.shape)) if edge else None

    def data(self, client: int) -> ClientData:
        return replace(self._here().data(0), client=client, classes=self.num_classes, public=self.public())

    def test(self, client: int) -> Split:
        return self._here().test(0)

    def official(self) -> Split | None:
        return None

    def sizes(self, part: Part | Literal["all"] = "train") -> Ints:
        """Of others only what the settings promise is known: each has samples of every part that has a share."""
        here = 1 if part != "val" or self.settings.val_share > 0 else 0
        return np.full(len(self.clients), here if self.own is None else int(self.own.sizes(part)[0]), dtype=np.int64)

    def source(self, client: int) -> Dataset:
        return self.dataset if self.own is None else self.own.dataset

    def rotation(self, client: int) -> float:
        return 0.0

    def _here(self) -> Federation:
        if self.own is None:
            raise CoterieError("the cloud has no data of its own")
        return self.own


def example(
    shape: tuple[int, ...],
    classes: tuple[str, ...],
    kind: str,
    vocab: int | None,
    mean: Any,
    std: Any,
    task: str = "classification",
    targets: int = 1,
) -> Dataset:
    """Two empty items of the kind the devices have: what a model is built from."""
    x = torch.zeros((2, *shape), dtype={"float32": torch.float32, "uint8": torch.uint8, "int64": torch.int64}[kind])
    none = torch.zeros(2, dtype=torch.bool)
    is_class = task in ("classification", "binary")
    y = torch.zeros(2, dtype=torch.int64) if is_class else torch.zeros(2, targets)
    return Dataset("own", x, y, classes, none, None, mean, std, vocab, task)


def only_client(data: Dataset, like: Dataset, settings: PartitionSettings, seed: int) -> Federation:
    """A device's data as a federation of one; its official test part, if it has one, is its test part."""
    if data.shape != like.shape or (data.x.dtype == torch.int64) != (like.x.dtype == torch.int64):
        raise CoterieError(
            f"the data here are {data.x.dtype} {data.shape}, the federation's are {like.x.dtype} {like.shape}"
        )
    if data.targets != like.targets or (data.y.dtype == torch.int64) != (like.y.dtype == torch.int64):
        raise CoterieError(
            f"the data here have targets for {data.kind} ({data.targets} each), "
            f"the federation's are for {like.kind} ({like.targets} each)"
        )
    if like.task.classes and len(data) and int(data.y.max()) >= len(like.classes):
        raise CoterieError(
            f"the data here have label {int(data.y.max())}, the federation has {len(like.classes)} classes"
        )
    own = bool(data.is_test.any())
    pieces: dict[str, Any] = {"partition": "iid", "clients": 1, "public": 0, "min_size": 1, "cap": False}
    pieces |= {"pool": "train", "test_from": "official"} if own else {"pool": "merged", "test_from": "own"}
    same = replace(data, classes=like.classes, mean=like.mean, std=like.std, owner=None)  # one normalisation for all
    return federate(same, settings.model_copy(update=pieces | {"short": "redraw"}), seed)
