"""Names, the user's own arrays, torch data sets, texts, the hub, and showing a partition."""

import io
import sys
import types

import numpy as np
import pytest
import torch
from rich.console import Console

from coterie.data import Dataset, PartitionSettings, federate, from_arrays, from_torch, list_datasets, load_dataset
from coterie.data.catalogue import DATASETS
from coterie.data.overview import draw_partition, partition_table
from coterie.data.text import LENGTH, VOCABULARY, tokens
from coterie.errors import CoterieError


def made_by_a_user():
    return from_arrays(np.zeros((6, 2), np.float32), [0, 1] * 3, name="made")


def not_a_data_set():
    return 3


def test_digits_are_always_available():
    d = load_dataset("digits")
    assert d.x.shape == (1797, 1, 8, 8) and d.x.dtype == torch.float32 and float(d.x.max()) == 1
    assert int(d.is_test.sum()) == 359 and len(d.classes) == 10
    train = d.ready((~d.is_test).nonzero().flatten())
    assert abs(float(train.mean())) < 1e-5 and abs(float(train.std()) - 1) < 1e-3


def test_all_sets_of_the_papers_are_known_by_name(tmp_path):
    papers = ["cifar10", "cifar100", "cinic10", "emnist", "fmnist", "organamnist", "mnist", "svhn", "tinyimagenet"]
    assert set(papers) | {"digits"} == set(DATASETS)
    listed = {k.name: k for k in list_datasets(tmp_path)}
    assert listed["digits"].available and not listed["cifar10"].available
    assert listed["emnist"].classes == 62 and listed["tinyimagenet"].shape == (3, 64, 64)
    for name in papers:
        words = f"{name} is not on this machine: run `coterie data get {name}`, put {name}.npz"
        with pytest.raises(CoterieError, match=words) as e:
            load_dataset(name, tmp_path)
        assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)


def test_the_environment_names_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    np.savez(tmp_path / "mnist.npz", x_train=np.zeros((4, 28, 28), np.uint8), y_train=[1, 2, 3, 4])
    d = load_dataset("mnist")
    assert d.y.tolist() == [1, 2, 3, 4] and d.classes == tuple("0123456789")
    assert {k.name: k.available for k in list_datasets()}["mnist"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifr10", 'unknown data "cifr10"; did you mean "cifar10"'),
        ("no/such/file.npz", "does not exist"),
        ("no/such/folder", "does not exist"),
        ("nomodule:f", "cannot be imported"),
        (f"{__name__}:nothing", "cannot be imported"),
        (f"{__name__}:not_a_data_set", "returned int"),
    ],
)
def test_unknown_data_raise_a_clear_error(name, message, tmp_path):
    with pytest.raises(CoterieError, match=message) as e:
        load_dataset(name, tmp_path)
    assert "\n" not in str(e.value)


def test_a_users_function_is_called(tmp_path):
    assert load_dataset(f"{__name__}:made_by_a_user").name == "made"
    with pytest.raises(CoterieError, match="is not a folder"):
        load_dataset("digits", tmp_path / "none")
    with pytest.raises(CoterieError, match="subset must be at least 1"):
        load_dataset("digits", subset=0)


def test_a_subset_is_deterministic_and_keeps_the_shares():
    a, b = load_dataset("digits", subset=500), load_dataset("digits", subset=500)
    assert len(a) == 500 and torch.equal(a.x, b.x) and int(a.is_test.sum()) == 100 and a.name == "digits[500]"
    assert len(load_dataset("digits", subset=10**6)) == 1797


@pytest.mark.parametrize(
    ("given", "dtype", "shape", "stored_as"),
    [
        ((5, 28, 28), np.uint8, (1, 28, 28), torch.uint8),
        ((5, 16, 20, 3), np.uint8, (3, 16, 20), torch.uint8),
        ((5, 3, 16, 20), np.uint8, (3, 16, 20), torch.uint8),
        ((5, 28, 28), np.float64, (1, 28, 28), torch.float32),
        ((5, 128, 6), np.float16, (6, 128), torch.float32),
        ((5, 6, 128), np.float32, (6, 128), torch.float32),
        ((5, 7), np.float32, (7,), torch.float32),
        ((5, 7), np.int32, (7,), torch.int64),
        ((5, 28, 28), np.int64, (1, 28, 28), torch.uint8),
        ((5, 784), np.uint8, (784,), torch.float32),
    ],
)
def test_arrays_are_converted_to_the_form_that_models_need(given, dtype, shape, stored_as):
    x = (np.random.default_rng(0).random(given) * 200).astype(dtype)
    d = from_arrays(x, np.arange(5))
    assert d.shape == shape and d.x.dtype == stored_as
    assert d.ready(torch.tensor([1, 3])).shape == (2, *shape)


def test_signals_keep_time_order_when_channels_move_first():
    x = np.random.default_rng(0).random((4, 9, 2)).astype(np.float32)
    assert torch.equal(from_arrays(x, np.zeros(4)).x, torch.from_numpy(x).transpose(1, 2))


def test_labels_may_be_names_columns_or_have_gaps():
    x = np.zeros((4, 2))
    d = from_arrays(x, ["dog", "cat", "dog", "owl"])
    assert d.y.tolist() == [1, 0, 1, 2] and d.classes == ("cat", "dog", "owl")
    d = from_arrays(x, np.array([[3], [7], [3], [9]]))
    assert d.y.tolist() == [0, 1, 0, 2] and d.classes == ("3", "7", "9")


@pytest.mark.parametrize(
    ("args", "kw", "message"),
    [
        ((np.zeros((3, 2)), [0, 1]), {}, "3 items but 2 labels"),
        ((np.zeros((2, 2)), [0.5, 1]), {"task": "classification"}, "whole numbers"),
        ((np.zeros((2, 2)), np.eye(2)), {}, "give the number of the column"),
        ((np.full((2, 2), np.nan), [0, 1]), {}, "not finite"),
        ((np.zeros((2, 2)), [0, 5]), {"classes": ["a", "b"]}, "run from 0 to 5, but there are 2 classes"),
        ((np.zeros((0, 2)), []), {}, "no training samples"),
        ((np.array([{}, {}]), [0, 1]), {}, "numbers or texts"),
        ((np.zeros((2, 2)), [0, 1], np.zeros((2, 3)), [0, 1]), {}, "differ in shape"),
        ((np.zeros((2, 2)), [0, 1], np.zeros((2, 2))), {}, "only one of x_test and y_test"),
        ((np.zeros((2, 2)), [0, 1]), {"client": [1]}, r"client ids of shape \(1,\)"),
        ((-np.ones((2, 2), int), [0, 1]), {}, "negative"),
    ],
)
def test_arrays_that_do_not_fit_raise_a_clear_error(args, kw, message):
    with pytest.raises(CoterieError, match=message):
        from_arrays(*args, **kw)


def test_torch_data_sets_are_read_through_their_own_transforms():
    class Squares(torch.utils.data.Dataset):
        classes = ("even", "odd")

        def __len__(self):
            return 6

        def __getitem__(self, i):
            return torch.full((1, 4, 4), float(i * i)), i % 2

    d = from_torch(Squares(), Squares())
    assert d.x.shape == (12, 1, 4, 4) and d.x[5, 0, 0, 0] == 25 and d.classes == ("even", "odd")
    assert int(d.is_test.sum()) == 6 and isinstance(d, Dataset)
    with pytest.raises(CoterieError, match="must give"):
        from_torch([(torch.zeros(2), 0), (torch.zeros(3), 1)])


class Items:
    """A data set with one odd item."""

    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return (torch.zeros(2), 0) if i < 2 else self.item()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Items(lambda: torch.zeros(2)), r"pair \(x, y\) for each index; item 2 is a Tensor of 2"),
        (Items(lambda: (torch.zeros(2), 0, 5)), "item 2 is a tuple of 3"),
        (Items(lambda: None), "item 2 is a NoneType"),
        (Items(lambda: 1 / 0), "item 2 of torch data set torch cannot be read: ZeroDivisionError"),
        ([], "has no items"),
        (iter([]), "must have a length"),
    ],
)
def test_an_odd_torch_data_set_gets_one_sentence(source, sentence):
    with pytest.raises(CoterieError, match=sentence):
        from_torch(source)


def test_whole_numbers_beyond_any_vocabulary_are_no_tokens():
    with pytest.raises(CoterieError, match="too large for token ids; give floats or items="):
        from_arrays(np.array([[1, 2], [10**12, 4]]), [0, 1])


def test_texts_become_the_same_token_ids_everywhere():
    ids = tokens(np.array(["Hello, hello world", "", "a " * 100]))
    assert ids.shape == (3, LENGTH) and ids[0, 0] == ids[0, 1] != ids[0, 2] and ids[0, 3] == 0
    assert ids[1].sum() == 0 and (ids[2] > 0).all() and ids.max() < VOCABULARY
    assert ids[0, 0] == 1 + 0x3610A686 % (VOCABULARY - 1)  # crc32 of "hello"
    d = from_arrays(np.array(["good film", "bad film"]), ["pos", "neg"])
    assert d.vocab == VOCABULARY and d.ready(torch.tensor([0])).dtype == torch.int64


class FakePart(dict):
    column_names = property(lambda self: list(self))
    features = None


def test_the_hub_is_read_through_datasets_and_failures_raise_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CoterieError, match=r"pip install 'coterie\[hub\]'"):
        load_dataset("hub:me/mine")
    part = FakePart(image=[np.zeros((4, 5, 3), np.uint8), np.ones((4, 5), np.uint8)], label=[0, 1], client=["a", "b"])
    part.features = {"label": types.SimpleNamespace(names=["x", "y"])}
    requests = []

    def load_from_hub(name, configuration):
        requests.append((name, configuration))
        if name == "me/broken":
            raise RuntimeError("no such set\nmore")
        return {"train": part, "test": part} if name == "me/mine" else {"all": part}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_from_hub))
    d = load_dataset("hub:me/mine:small")
    assert requests == [("me/mine", "small")] and d.shape == (3, 4, 5) and d.classes == ("x", "y")
    assert d.owner.tolist() == [0, 1, 0, 1] and d.is_test.tolist() == [False, False, True, True]
    for name, message in (("me/broken", "could not be loaded: no such set$"), ("me/other", "no part called train")):
        with pytest.raises(CoterieError, match=message):
            load_dataset(f"hub:{name}")
    del part["label"]
    with pytest.raises(CoterieError, match="no column for labels"):
        load_dataset("hub:me/mine")


def printed(fed):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(partition_table(fed))
    return " ".join(console.export_text().split())


def test_the_table_lists_every_client_or_says_how_many_it_shows():
    digits = load_dataset("digits")
    text = printed(federate(digits, PartitionSettings(partition="rotate(2)", clients=8, public=10), 0))
    assert "8 clients, 1787 samples" in text and "180°" in text and "10 public items" in text
    assert "30 of 100 clients shown" in printed(federate(digits, PartitionSettings(partition="iid", clients=100), 0))


@pytest.mark.parametrize(("clients", "suffix"), [(8, ".png"), (100, ".svg")])
def test_the_picture_is_written_or_a_clear_error_raised(tmp_path, clients, suffix):
    fed = federate(
        load_dataset("digits"), PartitionSettings(partition="rotate(4, 100)", clients=clients, min_size=2), 0
    )
    path = draw_partition(fed, tmp_path / f"partition{suffix}")
    assert path.stat().st_size > 5000
    with pytest.raises(CoterieError, match=r"png, .svg or .pdf"):
        draw_partition(fed, tmp_path / "partition.docx")
    with pytest.raises(CoterieError, match="does not exist"):
        draw_partition(fed, tmp_path / "none" / "partition.png")
