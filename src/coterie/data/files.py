"""Readers of the original file formats. No code in a file is run; a damaged file raises CoterieError."""

import gzip
import io
import os
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from coterie.data import unpickle
from coterie.data.arrays import RawData
from coterie.data.dataset import Array
from coterie.data.on_disk import MAPPED_BYTES
from coterie.errors import CoterieError

_PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn any error while reading a file into a CoterieError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise CoterieError(f"{path} does not exist") from None
    except Exception as e:  # the formats' libraries raise nearly everything for damaged files
        reason = " ".join(str(e).split()).rstrip(".")[:200] or type(e).__name__
        if isinstance(e, UnicodeDecodeError):
            reason = "its text is not UTF-8; save it in this encoding"
        raise CoterieError(
            f"{path} cannot be read as {kind}; it is damaged, incomplete or of a different kind: {reason}"
        ) from e


def npz(path: Path) -> RawData:
    """Read an .npz file in one of three layouts.

    These are x_train, y_train, x_test, y_test (classes, client_train, client_test, group_train, group_test, task,
    items); x, y (client, group, split); or MedMNIST's names.
    """
    with reading(path, "an .npz data file"):
        arrays = _arrays(path)
        if "train_images" in arrays:
            parts = [p for p in ("train", "val") if f"{p}_images" in arrays]  # the validation part is for training
            arrays["x_train"] = np.concatenate([arrays[f"{p}_images"] for p in parts])
            arrays["y_train"] = np.concatenate([arrays[f"{p}_labels"] for p in parts])
            arrays |= {
                f"{a}_test": arrays[f"test_{b}"] for a, b in (("x", "images"), ("y", "labels")) if f"test_{b}" in arrays
            }
        arrays = {k + "_train" if k in ("x", "y", "client", "group") else k: v for k, v in arrays.items()}
        missing = [k for k in ("x_train", "y_train") if k not in arrays]
        if missing:
            raise ValueError(f"it lacks {' and '.join(missing)}")
        columns = ("x_test", "y_test", "client_test", "split", "group_test")
        return RawData(
            arrays["x_train"],
            arrays["y_train"],
            classes=[str(c) for c in arrays["classes"]] if "classes" in arrays else None,
            task=str(arrays["task"]) if "task" in arrays else None,
            items=str(arrays["items"]) if "items" in arrays else None,
            client=arrays.get("client_train"),
            group=arrays.get("group_train"),
            **{k: arrays[k] for k in columns if k in arrays},
        )


def new_items(path: Path) -> tuple[Array, Array | None]:
    """Read items and, if present, targets: x and y (or x_test and y_test) of an .npz file, or items of an .npy file."""
    with reading(path, "a file of items (.npz or .npy)"):
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False), None
        arrays = _arrays(path)
        suffix = "" if "x" in arrays else "_test"
        if f"x{suffix}" not in arrays:
            raise ValueError("it lacks x")
        x, y = arrays[f"x{suffix}"], arrays.get(f"y{suffix}")
        if x.ndim == 0 or (y is not None and (y.ndim == 0 or len(x) != len(y))):
            raise ValueError("x and y must have one row per item")
        return x, y


def own_items(path: Path) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Read the samples of a newcomer: x and y (or x_train and y_train), x_test and y_test; only x is required."""
    with reading(path, "a file of items (.npz)"):
        arrays = _arrays(path)
        suffix = "" if "x" in arrays else "_train"
        if f"x{suffix}" not in arrays:
            raise ValueError("it lacks x")
        return arrays[f"x{suffix}"], arrays.get(f"y{suffix}"), arrays.get("x_test"), arrays.get("y_test")


def _free_memory() -> int:
    """Return the bytes of memory that a program can get; a machine that does not say how many has no bound."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return sys.maxsize


def _arrays(path: Path) -> dict[str, Array]:
    with path.open("rb") as f:
        if (start := f.read(4)) not in (b"PK\x03\x04", b"PK\x05\x06"):
            raise ValueError("its first bytes are wrong" if start else "it is empty")
        with zipfile.ZipFile(f) as archive:
            packed = (part.file_size for part in archive.infolist() if part.compress_type != zipfile.ZIP_STORED)
            size, free = sum(packed), _free_memory()
        if size > free:
            raise ValueError(
                f"it unpacks to {size / 1e9:.1f} GB, and this machine has {free / 1e9:.1f} GB of free memory"
            )
        f.seek(0)
        with np.load(f, allow_pickle=False) as z:  # opened here, because numpy does not close a broken archive
            try:
                arrays = {k: _mapped(path, f"{k}.npy") if _is_large(z, f"{k}.npy") else z[k] for k in z.files}
            except ValueError as e:
                if "allow_pickle" in str(e):
                    raise ValueError("it holds Python objects, and these are never loaded") from None
                raise
    for k, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"its part {k} is not an array")
    return arrays


def _is_large(z: "np.lib.npyio.NpzFile", member: str) -> bool:
    """True if an array of an .npz file is stored without compression and so large that it is not read into memory."""
    info = z.zip.getinfo(member)  # type: ignore[union-attr]  # the file is open
    return info.compress_type == zipfile.ZIP_STORED and info.file_size >= MAPPED_BYTES


def _mapped(path: Path, member: str) -> Array:
    """Return an uncompressed array of an .npz file that stays on disk; changes to it are not written."""
    with zipfile.ZipFile(path) as z, path.open("rb") as f:
        f.seek(z.getinfo(member).header_offset + 26)
        name, extra = struct.unpack("<HH", f.read(4))  # lengths of the two parts after the fixed header
        f.seek(name + extra, os.SEEK_CUR)
        version = np.lib.format.read_magic(f)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(f)
        if dtype.hasobject:
            raise ValueError("it holds Python objects, and these are never loaded")
        return np.memmap(path, dtype, "c", f.tell(), shape, "F" if fortran else "C")


def idx(path: Path) -> Array:
    """Read an array in MNIST's format, packed by gzip or not."""
    with reading(path, "an idx file"):
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
            raise ValueError("its first bytes are wrong")
        shape = tuple(int(d) for d in np.frombuffer(raw, ">u4", raw[3], 4))
        dtype = np.dtype(_IDX_TYPES[raw[2]])
        data = raw[4 + 4 * raw[3] :]
        if len(data) != int(np.prod(shape)) * dtype.itemsize:
            raise ValueError(f"it should hold {int(np.prod(shape))} values and holds {len(data) // dtype.itemsize}")
        return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def idx_set(files: Sequence[Path], transpose: bool = False) -> RawData:
    """Read training pictures and labels, test pictures and labels; EMNIST stores its pictures transposed."""
    x, y, x_test, y_test = (idx(f) for f in files)
    for pictures, f in ((x, files[0]), (x_test, files[2])):
        if pictures.ndim != 3:
            raise CoterieError(f"{f} holds an array of {pictures.ndim} dimensions; pictures need 3")
    if transpose:
        x, x_test = x.transpose(0, 2, 1), x_test.transpose(0, 2, 1)
    return RawData(x, y, x_test, y_test)


def cifar(train: Sequence[Path], test: Path, meta: Path, label: str) -> RawData:
    """Read CIFAR's python folders; `label` is labels or fine_labels."""
    parts = [_cifar_batch(p, label) for p in train]
    x_test, y_test = _cifar_batch(test, label)
    names: list[str] | None = None
    if meta.exists():
        with reading(meta, "CIFAR's list of class names"):
            key = "fine_label_names" if label == "fine_labels" else "label_names"
            stored = _text_keys(unpickle.plain_values(meta.read_bytes()))[key]
            names = [n.decode() if isinstance(n, bytes) else str(n) for n in stored]
    return RawData(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), x_test, y_test, names)


def _cifar_batch(path: Path, label: str) -> tuple[Array, Array]:
    with reading(path, "a CIFAR file"):
        batch = _text_keys(unpickle.plain_values(path.read_bytes()))
        if "data" not in batch or label not in batch:
            raise ValueError(f"it has no data or no {label}")
        return np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32), np.asarray(batch[label], np.int64)


def _text_keys(value: object) -> dict[str, list[object]]:
    if not isinstance(value, dict):
        raise ValueError("it does not hold a dictionary")
    return {k.decode("latin-1") if isinstance(k, bytes) else str(k): v for k, v in value.items()}


def svhn(files: Sequence[Path]) -> RawData:
    """Read train_32x32.mat and test_32x32.mat, in which the digit 0 has the label 10."""
    import scipy.io  # slow to import, and only needed here

    arrays: list[Array] = []
    for path in files:
        with reading(path, "an SVHN .mat file"):
            mat = scipy.io.loadmat(path, variable_names=["X", "y"])
            if "X" not in mat or "y" not in mat or mat["X"].ndim != 4:
                raise ValueError("it lacks the arrays X and y")
            arrays += [mat["X"].transpose(3, 2, 0, 1), mat["y"].reshape(-1).astype(np.int64) % 10]
    return RawData(arrays[0], arrays[1], arrays[2], arrays[3])


def folder(root: Path) -> RawData:
    """Read pictures in train/CLASS and test/CLASS (valid counts as training), or only in CLASS folders."""
    if root.resolve() == Path(root.anchor or "/"):
        raise CoterieError(f"{root} is the whole disk; name the folder of the data")
    if (root / "train").is_dir():
        trains = [root / "train"] + ([root / "valid"] if (root / "valid").is_dir() else [])
        test = next((root / d for d in ("test", "val") if (root / d).is_dir()), None)
    else:
        trains, test = [root], None
    classes = sorted({d.name for part in [*trains, *([test] if test else [])] for d in part.iterdir() if d.is_dir()})
    train = [f for part in trains for f in _labelled(part, classes)]
    tests = _labelled(test, classes) if test else []
    if not train:
        raise CoterieError(
            f"{root} holds no pictures in folders named after classes (train/CLASS/*.png or CLASS/*.png)"
        )
    return _pictures(train, tests, classes)


def parquet(paths: Sequence[Path]) -> RawData:
    """Read pictures and labels of a data set of the Hugging Face hub; file names begin with train or test."""
    parts: dict[str, tuple[list[Array], list[Array]]] = {"train": ([], []), "test": ([], [])}
    for path in paths:
        with reading(path, "a parquet file of pictures"):
            import pyarrow.parquet as pq  # slow to import

            table = pq.read_table(path)
            item = next(c for c in ("image", "img") if c in table.column_names)
            label = next(c for c in ("label", "fine_label") if c in table.column_names)
            x, y = parts[path.name.partition("-")[0]]
            x += [np.asarray(Image.open(io.BytesIO(v["bytes"]))) for v in table[item].to_pylist()]
            y.append(np.asarray(table[label]))
    (x, y), (x_test, y_test) = parts["train"], parts["test"]
    return RawData(np.stack(x), np.concatenate(y), np.stack(x_test), np.concatenate(y_test), None)


def tiny_imagenet(root: Path) -> RawData:
    """Read train/CLASS/images and, as the test part, val/images with val_annotations.txt.

    The labels of Tiny-ImageNet's own test part are not public.
    """
    classes = sorted(d.name for d in (root / "train").iterdir() if d.is_dir())
    notes = root / "val" / "val_annotations.txt"
    with reading(notes, "Tiny-ImageNet's annotations"):
        rows = [line.split("\t") for line in notes.read_text().splitlines() if line.strip()]
        number = {c: i for i, c in enumerate(classes)}
        tests = [(root / "val" / "images" / row[0], number[row[1]]) for row in rows]
    train = _labelled(root / "train", classes)
    if not train:
        raise CoterieError(f"{root / 'train'} holds no pictures in folders named after classes")
    return _pictures(train, tests, classes)


def _labelled(part: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Return (file, class number) pairs, sorted by name so that sample indices are the same on every machine.

    Only two levels below the class folder are searched, so that a wrong folder does not make the search endless.
    """
    labelled = []
    for c, d in enumerate(classes):
        with reading(part / d, "a folder of pictures"):
            inside = [f for depth in ("*", "*/*", "*/*/*") for f in (part / d).glob(depth)]
        labelled += [(f, c) for f in sorted(inside) if f.suffix.lower() in _PICTURES]
    return labelled


def _pictures(train: list[tuple[Path, int]], test: list[tuple[Path, int]], classes: Sequence[str]) -> RawData:
    files = [f for f, _ in train + test]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding releases Python's lock
        pictures = list(pool.map(_picture, files, chunksize=256))
    depth = next((i for i, p in enumerate(pictures) if p.dtype != pictures[0].dtype), None)
    if depth is not None:
        types = f"{files[0]} is {pictures[0].dtype} and {files[depth]} {pictures[depth].dtype}"
        raise CoterieError(f"pictures must have one depth, but {types}")
    if any(p.ndim == 3 for p in pictures):  # grey pictures among coloured ones
        pictures = [p if p.ndim == 3 else np.repeat(p[:, :, None], 3, axis=2) for p in pictures]
    odd = next((i for i, p in enumerate(pictures) if p.shape != pictures[0].shape), None)
    if odd is not None:
        a, b = pictures[0].shape, pictures[odd].shape
        raise CoterieError(
            f"pictures must be of one size, but {files[0]} is {a[1]}x{a[0]} and {files[odd]} {b[1]}x{b[0]}"
        )
    x, y = np.stack(pictures), np.array([c for _, c in train + test], np.int64)
    x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    n = len(train)
    return RawData(x[:n], y[:n], x[n:] if test else None, y[n:] if test else None, classes)


def _picture(path: Path) -> Array:
    with reading(path, "a picture"), Image.open(path) as picture:
        if picture.mode.startswith("I") or picture.mode == "F":  # 16 or 32 bits, which conversion would cut to 255
            return np.asarray(picture)
        return np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))
