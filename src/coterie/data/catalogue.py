"""The catalogue of data sets known by name: their classes, their files and the folders searched for these."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.data import files
from coterie.data.arrays import RawData

_DIGITS = tuple("0123456789")
_UPPER = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left", "lung-right",
    "pancreas", "spleen",
)  # fmt: skip
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_EMNIST = tuple(
    f"emnist-byclass-{part}-{what}-ubyte" for part in ("train", "test") for what in ("images-idx3", "labels-idx1")
)


@dataclass(frozen=True)
class KnownDataset:
    """An entry of the catalogue."""

    name: str
    text: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    samples: tuple[int, int]  # sizes of the original train and test parts
    needs: tuple[str, ...] = ()  # files or folders of the original form, packed by gzip or not
    folders: tuple[str, ...] = ()  # subfolders of the data folder that are searched
    read: Callable[[Sequence[Path]], RawData] | None = None
    system: tuple[str, ...] = ()  # folders in which Linux distributions install it
    hub: tuple[str, ...] = ()  # repositories of the Hugging Face hub with the same pictures

    def find(self, root: Path) -> list[Path] | None:
        """Return the path of NAME.npz, or all paths of the original form, or None if files are missing."""
        for folder in (root, root / self.name, *(root / f for f in self.folders)):
            if (folder / f"{self.name}.npz").is_file():
                return [folder / f"{self.name}.npz"]
            paths = [next((p for p in (folder / n, folder / f"{n}.gz") if p.exists()), None) for n in self.needs]
            present = [p for p in paths if p is not None]
            if present and len(present) == len(self.needs):
                return present
        return None

    def load(self, paths: Sequence[Path]) -> RawData:
        if paths[0].suffix == ".parquet":
            raw = files.parquet(paths)
        else:
            raw = files.npz(paths[0]) if paths[0].suffix == ".npz" or self.read is None else self.read(paths)
        return raw if raw.classes is not None else raw._replace(classes=self.classes)


def _cifar10(paths: Sequence[Path]) -> RawData:
    return files.cifar(paths[:-1], paths[-1], paths[-1].parent / "batches.meta", "labels")


def _cifar100(paths: Sequence[Path]) -> RawData:
    return files.cifar(paths[:1], paths[1], paths[1].parent / "meta", "fine_labels")


def _numbers(n: int) -> tuple[str, ...]:
    return tuple(map(str, range(n)))


DATASETS: dict[str, KnownDataset] = {
    k.name: k
    for k in (
        KnownDataset(
            "digits", "8x8 handwritten digits of scikit-learn; always available", _DIGITS, (1, 8, 8), (1438, 359),
        ),
        KnownDataset(
            "mnist", "handwritten digits", _DIGITS, (1, 28, 28), (60_000, 10_000), _IDX, ("MNIST/raw",), files.idx_set,
            hub=("ylecun/mnist", "mnist"),
        ),
        KnownDataset(
            "fmnist", "Fashion-MNIST: pieces of clothing", _CLOTHES, (1, 28, 28), (60_000, 10_000), _IDX,
            ("FashionMNIST/raw", "fashion-mnist"), files.idx_set, ("/usr/share/datasets/fashion-mnist",),
            hub=("zalando-datasets/fashion_mnist", "fashion_mnist"),
        ),
        KnownDataset(
            "emnist", "EMNIST ByClass: digits and letters", _DIGITS + _UPPER + tuple(c.lower() for c in _UPPER),
            (1, 28, 28), (697_932, 116_323), _EMNIST, ("EMNIST/raw", "gzip"),
            lambda paths: files.idx_set(paths, transpose=True),
        ),
        KnownDataset(
            "cifar10", "CIFAR-10: small photographs", _CIFAR10, (3, 32, 32), (50_000, 10_000),
            (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"), ("cifar-10-batches-py",), _cifar10,
            hub=("uoft-cs/cifar10", "cifar10"),
        ),
        KnownDataset(
            "cifar100", "CIFAR-100: small photographs, fine labels", _numbers(100), (3, 32, 32), (50_000, 10_000),
            ("train", "test"), ("cifar-100-python",), _cifar100,
            hub=("uoft-cs/cifar100", "cifar100"),
        ),
        KnownDataset(
            "cinic10", "CINIC-10: CIFAR-10 and more of ImageNet", _CIFAR10, (3, 32, 32), (180_000, 90_000),
            ("train", "valid", "test"), ("CINIC-10", "cinic-10"), lambda paths: files.folder(paths[0].parent),
        ),
        KnownDataset(
            "svhn", "street view house numbers", _DIGITS, (3, 32, 32), (73_257, 26_032),
            ("train_32x32.mat", "test_32x32.mat"), ("SVHN",), files.svhn,
        ),
        KnownDataset(
            "organamnist", "MedMNIST OrganA: organs in CT slices", _ORGANS, (1, 28, 28), (34_581, 24_269), (),
            ("medmnist",),
        ),
        KnownDataset(
            "tinyimagenet", "Tiny-ImageNet: photographs", _numbers(200), (3, 64, 64), (100_000, 10_000),
            ("train", "val/val_annotations.txt"), ("tiny-imagenet-200",),
            lambda paths: files.tiny_imagenet(paths[0].parent),
        ),
    )
}  # fmt: skip


def data_dir() -> Path:
    """Return the data folder: COTERIE_DATA, or a folder in the user's cache."""
    path = os.environ.get("COTERIE_DATA")
    return Path(path).expanduser() if path else Path.home() / ".cache" / "coterie" / "data"


def locate(known: KnownDataset, folder: Path | None) -> list[Path] | None:
    """Return the files of a known data set below `folder`, or None.

    If `folder` is None, it searches Coterie's own data folder, those of Linux distributions, `data` in the working
    directory (torchvision's default), and the caches of Keras and Hugging Face.
    """
    if folder is not None:
        return known.find(folder)
    for root in (data_dir(), *map(Path, known.system), Path("data"), *_keras()):
        if (paths := known.find(root)) is not None:
            return paths
    return _hub_cache(known)


def _keras() -> list[Path]:
    root = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "datasets"
    return [root, *sorted(root.glob("*-target"))] if root.is_dir() else []


def _hub_cache(known: KnownDataset) -> list[Path] | None:
    """Return the parquet files of the newest snapshot in Hugging Face's cache: train part first, then test part."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    for repository in known.hub:
        snapshots = (root / f"datasets--{repository.replace('/', '--')}" / "snapshots").glob("*")
        for snapshot in sorted(snapshots, key=lambda p: p.stat().st_mtime, reverse=True):
            train, test = (sorted(snapshot.rglob(f"{part}-*.parquet")) for part in ("train", "test"))
            if train and test:
                return [*train, *test]
    return None


def dataset_size(name: str, folder: Path | None = None) -> tuple[int, int]:
    """Return the sizes of the train and test parts: of the npz file if there is one, otherwise of the original."""
    paths = locate(DATASETS[name], folder) if name in DATASETS else None
    if paths and paths[0].suffix == ".npz":
        try:
            with np.load(paths[0], allow_pickle=False) as z:
                return len(z["y_train"]), len(z["y_test"]) if "y_test" in z else 0
        except (KeyError, ValueError, OSError):
            pass  # the arrays have different names; use the size of the original
    return DATASETS[name].samples if name in DATASETS else (60_000, 10_000)


def missing_message(known: KnownDataset, folder: Path | None) -> str:
    """Return the sentence that says which files to put into which folder."""
    root = folder or data_dir()
    forms = f"{known.name}.npz with x_train, y_train, x_test, y_test"
    if known.name == "organamnist":
        forms = "organamnist.npz of MedMNIST"
    elif known.needs:
        inside = f" (in a folder {known.folders[0]})" if known.folders else ""
        forms += f", or {', '.join(known.needs)}{inside},"
    get = "" if known.name == "digits" else f"run `coterie data get {known.name}`, "
    return f"{known.name} is not on this machine: {get}put {forms} into {root}, or name their folder with --data-dir"
