"""Every reader on small files: intact, truncated, wrong and hostile."""

import gzip
import os
import pickle
import struct

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from coterie.data import load_dataset, save_dataset, unpickle
from coterie.errors import CoterieError

RNG = np.random.default_rng(0)


def pictures(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def write_idx(path, array, pack=True):
    raw = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if pack else raw)


def idx_files(folder, names, pack=True):
    x, y = pictures(20, 28, 28), np.arange(20, dtype=np.uint8) % 10
    for name, array in zip(names, (x[:15], y[:15], x[15:], y[15:]), strict=True):
        write_idx(folder / (name + (".gz" if pack else "")), array, pack)
    return x, y


MNIST = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
EMNIST = [f"emnist-byclass-{p}-{w}-ubyte" for p in ("train", "test") for w in ("images-idx3", "labels-idx1")]


@pytest.mark.parametrize(("name", "below"), [("mnist", ""), ("mnist", "MNIST/raw"), ("fmnist", "fmnist")])
@pytest.mark.parametrize("pack", [True, False])
def test_idx_files_are_read_packed_or_not(tmp_path, name, below, pack):
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    x, y = idx_files(tmp_path / below, MNIST, pack)
    d = load_dataset(name, tmp_path)
    assert torch.equal(d.x, torch.from_numpy(x)[:, None]) and d.y.tolist() == y.tolist()
    assert d.is_test.tolist() == [False] * 15 + [True] * 5 and len(d.classes) == 10


def test_emnist_pictures_are_transposed(tmp_path):
    x, _ = idx_files(tmp_path, EMNIST)
    d = load_dataset("emnist", tmp_path)
    assert torch.equal(d.x[:, 0], torch.from_numpy(x).transpose(1, 2)) and len(d.classes) == 62


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"hello", lambda b: b[:3]])
def test_damaged_idx_files_raise_a_clear_error(tmp_path, damage):
    for pack in (True, False):
        idx_files(tmp_path, MNIST, pack)
        path = tmp_path / (MNIST[0] + (".gz" if pack else ""))
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(CoterieError, match=f"{path.name} cannot be read as an idx file") as e:
            load_dataset("mnist", tmp_path)
        assert "\n" not in str(e.value)
        path.unlink()


def cifar10_files(folder, protocol=2):
    folder.mkdir(exist_ok=True)
    x, y = pictures(30, 3072), RNG.integers(0, 10, 30).tolist()
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        part = slice(5 * i, 5 * i + 5)
        value = {b"data": x[part], b"labels": y[part], b"batch_label": b"some", b"filenames": [b"a.png", b"b.png"]}
        (folder / name).write_bytes(pickle.dumps(value, protocol))
    return x.reshape(-1, 3, 32, 32), y


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_cifar10_is_read_without_running_its_pickles(tmp_path, protocol, monkeypatch):
    x, y = cifar10_files(tmp_path / "cifar-10-batches-py", protocol)
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    d = load_dataset("cifar10", tmp_path)
    assert torch.equal(d.x, torch.from_numpy(x)) and d.y.tolist() == y
    assert int(d.is_test.sum()) == 5 and d.classes[0] == "airplane"


def test_cifar100_uses_fine_labels_and_the_names_of_its_meta_file(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        value = {"data": pictures(4, 3072), "fine_labels": [0, 99, 5, 7], "coarse_labels": [1, 1, 1, 1]}
        (folder / name).write_bytes(pickle.dumps(value, 2))
    assert load_dataset("cifar100", tmp_path).y.tolist() == [0, 99, 5, 7] * 2
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [f"c{i}".encode() for i in range(100)]}, 2))
    assert load_dataset("cifar100", tmp_path).classes[99] == "c99"


def test_python_2_pickles_with_byte_strings_are_read():
    raw = b"\x80\x02}q\x00(U\x06labelsq\x01]q\x02(K\x01K\x02eU\x04noteT\x02\x00\x00\x00\xffau."
    assert unpickle.plain_values(raw) == {b"labels": [1, 2], b"note": b"\xffa"}


class Hostile:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_cifar_file_is_rejected_and_not_run(tmp_path, protocol):
    cifar10_files(tmp_path)
    witness = tmp_path / "witness"
    for call in (Hostile(os.system, f"touch {witness}"), Hostile(eval, f"open({str(witness)!r}, 'w')")):
        bad = {b"data": call, b"labels": [1]}
        (tmp_path / "data_batch_3").write_bytes(pickle.dumps(bad, protocol))
        with pytest.raises(CoterieError, match=r"data_batch_3 cannot be read .* it wants to call") as e:
            load_dataset("cifar10", tmp_path)
        assert "\n" not in str(e.value) and not witness.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02cbuiltins\nobject\n)\x81.",  # NEWOBJ
        b"Ptrue\n.",  # PERSID
        b"cnumpy\ndtype\n(S'O'\ntR.",  # harmless, but not a plain value
        b"\x80\x02}(U\x01a.",
        b".",
        b"",
        b"garbage",
    ],
)
def test_only_pickles_of_plain_values_are_read(raw):
    try:
        value = unpickle.plain_values(raw)
    except (CoterieError, ValueError):
        return
    assert isinstance(value, unpickle._Dtype)


def test_object_arrays_and_truncated_cifar_files_are_rejected(tmp_path):
    cifar10_files(tmp_path)
    path = tmp_path / "test_batch"
    whole = path.read_bytes()
    for raw in (whole[: len(whole) // 2], whole[:-1], b"", pickle.dumps([1, 2]), pickle.dumps({b"data": 3})):
        path.write_bytes(raw)
        with pytest.raises(CoterieError, match="test_batch cannot be read as a CIFAR file"):
            load_dataset("cifar10", tmp_path)
    path.write_bytes(pickle.dumps({b"data": np.array([Hostile(os.getcwd)], object), b"labels": [1]}, 2))
    with pytest.raises(CoterieError, match=r"wants to call|other than numbers"):
        load_dataset("cifar10", tmp_path)


def test_svhn_label_ten_becomes_zero(tmp_path):
    x = pictures(6, 32, 32, 3)
    for name in ("train", "test"):
        y = np.array([[10], [1], [2], [9], [10], [3]], np.uint8)
        scipy.io.savemat(tmp_path / f"{name}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": y})
    d = load_dataset("svhn", tmp_path)
    assert d.y.tolist() == [0, 1, 2, 9, 0, 3] * 2
    assert torch.equal(d.x[:6], torch.from_numpy(x).permute(0, 3, 1, 2))
    path = tmp_path / "train_32x32.mat"
    for raw in (path.read_bytes()[:1000], b"", b"not a matrix" * 50):
        path.write_bytes(raw)
        with pytest.raises(CoterieError, match=r"train_32x32.mat cannot be read as an SVHN"):
            load_dataset("svhn", tmp_path)
    scipy.io.savemat(path, {"Z": x})
    with pytest.raises(CoterieError, match="lacks the arrays"):
        load_dataset("svhn", tmp_path)


def picture(path, size=(8, 8), mode="RGB", colour=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour if colour is not None else ("red" if mode == "RGB" else 7)).save(path)


def test_picture_folders_of_cinic10(tmp_path):
    names = ["airplane", "automobile", "bird"]
    for part in ("train", "valid", "test"):
        for i, c in enumerate(names):
            picture(tmp_path / "CINIC-10" / part / c / f"{i}.png", colour=(i, 0, 0))
    d = load_dataset("cinic10", tmp_path)
    assert d.y.tolist() == [0, 1, 2] * 3 and int(d.is_test.sum()) == 3 and d.classes == tuple(names)
    assert d.x[:, 0, 0, 0].tolist() == [0, 1, 2] * 3


def test_picture_folders_of_tiny_imagenet_with_grey_and_coloured_pictures(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for c in ("n01", "n02"):
        picture(root / "train" / c / "images" / f"{c}_0.JPEG", mode="L" if c == "n01" else "RGB")
        (root / "train" / c / f"{c}_boxes.txt").write_text("x")
    picture(root / "val" / "images" / "val_0.JPEG")
    picture(root / "test" / "images" / "test_0.JPEG")
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t1\t1\n")
    d = load_dataset("tinyimagenet", tmp_path)
    assert d.y.tolist() == [0, 1, 1] and d.is_test.tolist() == [False, False, True] and d.shape == (3, 8, 8)
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn77\n")
    with pytest.raises(CoterieError, match=r"val_annotations.txt cannot be read"):
        load_dataset("tinyimagenet", tmp_path)


def test_class_folders_are_read_and_wrong_ones_rejected(tmp_path):
    for c in ("cat", "dog"):
        picture(tmp_path / "pets" / c / "1.png", mode="L")
    d = load_dataset(str(tmp_path / "pets"))
    assert d.name == "pets" and d.classes == ("cat", "dog") and d.shape == (1, 8, 8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CoterieError, match="holds no pictures"):
        load_dataset(str(tmp_path / "empty"))
    picture(tmp_path / "pets" / "dog" / "2.png", (9, 8))
    with pytest.raises(CoterieError, match="must be of one size"):
        load_dataset(str(tmp_path / "pets"))
    (tmp_path / "pets" / "dog" / "2.png").write_bytes(b"not a picture")
    with pytest.raises(CoterieError, match=r"2.png cannot be read as a picture"):
        load_dataset(str(tmp_path / "pets"))


def test_npz_files_are_read_in_our_layout_and_in_medmnists(tmp_path):
    x, y = pictures(10, 8, 8, 3), np.arange(10, dtype=np.uint8) % 2
    np.savez(
        tmp_path / "mine.npz", x_train=x[:8], y_train=y[:8], x_test=x[8:], y_test=y[8:], classes=["a", "b"],
        client_train=np.array([5, 5, 5, 5, 2, 2, 2, 2]), client_test=np.array([5, 2]),
    )  # fmt: skip
    for name, where in (("mine", tmp_path), (str(tmp_path / "mine.npz"), None)):
        d = load_dataset(name, where)
        assert d.name == "mine" and d.shape == (3, 8, 8) and d.classes == ("a", "b")
        assert d.owner.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 1, 0]
    parts = {f"{p}_images": pictures(4, 28, 28) for p in ("train", "val", "test")}
    labels = {f"{p}_labels": np.array([[0], [3], [10], [1]], np.uint8) for p in ("train", "val", "test")}
    np.savez(tmp_path / "organamnist.npz", **parts, **labels)
    d = load_dataset("organamnist", tmp_path)
    assert d.x.shape == (12, 1, 28, 28) and int(d.is_test.sum()) == 4 and len(d.classes) == 11


def test_a_saved_data_set_reads_back_equal(tmp_path):
    x, y = pictures(10, 8, 8, 3), np.arange(10) % 2
    np.savez(tmp_path / "a.npz", x_train=x[:8], y_train=y[:8], x_test=x[8:], y_test=y[8:])
    a = load_dataset("a", tmp_path)
    save_dataset(a, tmp_path / "b.npz")
    b = load_dataset("b", tmp_path)
    assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.is_test, b.is_test) and a.mean == b.mean
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_damaged_wrong_and_hostile_npz_files_raise_a_clear_error(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, x_train=pictures(50, 8, 8), y_train=np.arange(50) % 2)
    whole = path.read_bytes()
    for raw in (whole[: len(whole) // 2], whole[:-30], b"", b"hello", b"PK hello", pickle.dumps({"x": 1})):
        path.write_bytes(raw)
        with pytest.raises(CoterieError, match=r"mine.npz cannot be read as an .npz data file") as e:
            load_dataset("mine", tmp_path)
        assert "\n" not in str(e.value) and "allow_pickle" not in str(e.value)
    np.savez(path, x_train=np.array([Hostile(os.getcwd)], object), y_train=[1])
    with pytest.raises(CoterieError, match="Python objects"):
        load_dataset("mine", tmp_path)
    np.savez(path, x_train=pictures(5, 8, 8))
    with pytest.raises(CoterieError, match="lacks y_train"):
        load_dataset("mine", tmp_path)
    np.savez(path, x_train=pictures(5, 8, 8), y_train=[0, 1])
    with pytest.raises(CoterieError, match="5 items but 2 labels"):
        load_dataset("mine", tmp_path)


def test_an_archive_that_unpacks_to_more_than_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    bomb = tmp_path / "bomb.npz"
    np.savez_compressed(bomb, x=np.zeros((2000, 1000)), y=np.zeros(2000, int))
    assert bomb.stat().st_size < 100_000
    monkeypatch.setattr("coterie.data.files._free_memory", lambda: 10_000_000)
    with pytest.raises(CoterieError, match=r"it unpacks to 0\.0 GB, and this machine has 0\.0 GB of free memory"):
        load_dataset(str(bomb))
