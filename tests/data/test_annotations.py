"""Splits, groups and client names that the data contain."""

import json

import numpy as np
import pytest
import torch

import coterie
from coterie.data import PartitionSettings, federate, from_arrays, load_dataset, save_dataset
from coterie.errors import CoterieError
from coterie.results.report.page import render

N = 60  # items of each of three clients


def arrays(seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.random((3 * N, 5), "float32"), rng.integers(0, 3, 3 * N), np.repeat(["zoe", "al b.", "mia"], N)


def natural(data, **more):
    return federate(data, PartitionSettings(partition="natural", **more), seed=1)


# ---- a split ---------------------------------------------------------------------------------------------------------
def split(words=("train", "val", "test")):
    return np.tile(np.repeat(np.array(words), N // 3), 3)


@pytest.mark.parametrize(
    "given", [split(), np.tile(np.repeat([0, 1, 2], N // 3), 3), split(("Train ", "valid", "TEST"))]
)
def test_natural_clients_keep_the_split_of_the_data(given):
    x, y, owner = arrays()
    data = from_arrays(x, y, client=owner, split=given)
    fed = natural(data)
    assert fed.names == ("al b.", "mia", "zoe") and fed.identity["test_from"] == "given"
    for i, name in enumerate(fed.names):
        first = int(np.flatnonzero(owner == name)[0])
        for k, part in enumerate(("train", "val", "test")):
            assert fed.indices(i, part).tolist() == list(range(first + k * N // 3, first + (k + 1) * N // 3))


def test_a_split_without_validation_gets_one_from_the_training_items():
    x, y, owner = arrays()
    fed = natural(from_arrays(x, y, client=owner, split=split(("train", "train", "test"))), val_share=0.25)
    assert fed.sizes("val").tolist() == [10] * 3 and fed.sizes("test").tolist() == [N // 3] * 3
    assert natural(fed.dataset, val_share=0).sizes("val").sum() == 0


def test_test_from_own_draws_a_new_split_and_other_partitions_keep_the_given_one():
    x, y, owner = arrays()
    data = from_arrays(x, y, client=owner, split=split())
    assert not np.array_equal(natural(data, test_from="own").indices(0, "test"), natural(data).indices(0, "test"))
    dealt = federate(data, PartitionSettings(partition="iid", clients=3), seed=0)
    assert dealt.identity["test_from"] == "given" and dealt.names == ("0", "1", "2") and not dealt.named
    tests = torch.cat([dealt.indices(i, "test") for i in dealt.clients]).sort().values
    assert torch.equal(tests, (data.part == 2).nonzero().flatten())


def test_a_split_may_be_kept_by_any_partition():
    x, y, owner = arrays()
    data = from_arrays(x, y, client=owner, split=split())
    fed = federate(data, PartitionSettings(partition="iid", clients=3, test_from="given"), seed=0)
    tests = torch.cat([fed.indices(i, "test") for i in fed.clients])
    assert sorted(tests.tolist()) == data.is_test.nonzero().flatten().tolist()


def test_the_official_test_items_of_natural_clients_are_their_own():
    x, y, owner = arrays()
    tx, ty, rng = x[::3] + 1, y[::3], np.random.default_rng(5)
    order = rng.permutation(len(ty))
    data = from_arrays(x, y, tx[order], ty[order], client=owner, client_test=owner[::3][order])
    fed = natural(data, pool="train", test_from="official")
    owners = data.owner
    for i, name in enumerate(fed.names):
        number = data.client_names.index(name)
        wanted = ((owners == number) & data.is_test).nonzero().flatten()
        assert fed.indices(i, "test").tolist() == wanted.tolist()
        assert all(owners[fed.indices(i, "train")] == number)


def test_official_items_of_clients_below_min_size_are_not_used():
    x, y, owner = arrays()
    few = np.r_[0:N, N : N + 3, 2 * N : 3 * N]  # "al b." has three items
    data = from_arrays(x[few], y[few], x[::3], y[::3], client=owner[few], client_test=owner[::3])
    fed = natural(data, pool="train", test_from="official", min_size=10)
    assert fed.names == ("mia", "zoe") and fed.sizes("test").tolist() == [N // 3] * 2


# ---- groups ----------------------------------------------------------------------------------------------------------
def test_a_group_is_in_one_part_only():
    x, y, owner = arrays()
    recording = np.tile(np.repeat(np.arange(12), 5), 3)
    data = from_arrays(x, y, client=owner, group=recording)
    fed = natural(data, test_share=0.25, val_share=0.2)
    for i in fed.clients:
        sides = [set(recording[fed.indices(i, part).numpy()]) for part in ("train", "val", "test")]
        assert [len(s) for s in sides] == [7, 2, 3] and sum(map(len, sides)) == len(set.union(*sides)) == 12
    assert not np.array_equal(natural(data).identity["sha256"], federate(data, fed.settings, 2).identity["sha256"])


def test_groups_of_different_clients_may_have_the_same_name():
    x, y, owner = arrays()
    fed = natural(from_arrays(x, y, client=owner, group=np.tile(np.repeat(["a", "b"], N // 2), 3)))
    assert fed.sizes("train").tolist() == fed.sizes("test").tolist() == [N // 2] * 3


# ---- names -----------------------------------------------------------------------------------------------------------
def test_clients_are_found_by_name_and_by_number():
    x, y, owner = arrays()
    fed = natural(from_arrays(x, y, client=owner))
    assert [fed.number(n) for n in ("al b.", "mia", "zoe", 0, 2)] == [0, 1, 2, 0, 2]
    numbered = natural(from_arrays(x, y, client=np.repeat([7, 3, 5], N)))
    assert numbered.names == ("3", "5", "7") and numbered.number("7") == 2
    for wrong, message in (("bob", 'unknown client "bob"; the clients are named al b., mia'), (3, "numbered 0 to 2")):
        with pytest.raises(CoterieError, match=message):
            fed.number(wrong)


def test_a_saved_data_set_is_read_back(tmp_path):
    x, y, owner = arrays()
    data = from_arrays(x, y, client=owner, split=split(), group=np.tile(np.repeat(np.arange(6), 10), 3))
    save_dataset(data, tmp_path / "mine.npz")
    again = load_dataset(str(tmp_path / "mine.npz"))
    assert again.client_names == data.client_names and again.digest == data.digest
    for name in ("part", "group", "owner", "is_test"):
        assert torch.equal(getattr(again, name), getattr(data, name))
    few = again.subset(90)
    assert len(few.part) == len(few.group) == 90 and natural(few, min_size=2).sizes("all").sum() == 90


def test_a_run_knows_its_clients_by_name(tmp_path):
    x, y, owner = arrays()
    data = from_arrays(x, y, client=owner, split=split(), name="people")
    few = {"rounds": 1, "join": 1.0, "epochs": 1, "workers": 1}
    run = coterie.run("fedper", data, "mlp", partition="natural", out=tmp_path / "r", **few)
    frame = run.clients()
    assert frame["name"].tolist() == ["al b.", "mia", "zoe"] == run.client_names
    again = coterie.open_run(tmp_path / "r", data=data)
    same = zip(again.personal("mia").parameters(), run.personal(1).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    with pytest.raises(CoterieError, match='unknown client "bob"'):
        run.personal("bob")
    assert json.dumps("al b.") in render([run])


def test_segmentation_masks_are_rejected():
    with pytest.raises(CoterieError, match=r"shape \(8, 8\) each, as in segmentation; .* such as classification"):
        from_arrays(np.zeros((4, 8, 8), np.uint8), np.zeros((4, 8, 8), int), name="masks")


# ---- mistakes --------------------------------------------------------------------------------------------------------
X, Y, OWNER = arrays()
MISTAKES = [
    ({"split": split()[:-1]}, {}, "180 items but a split of shape"),
    ({"split": np.full(3 * N, "later")}, {}, 'says "later"; the words for it are train, val and test'),
    ({"split": np.full(3 * N, 3)}, {}, "must be train, val and test, or 0, 1 and 2"),
    ({"split": np.full(3 * N, "test")}, {}, "has no training items"),
    ({"split": split(), "x_test": X, "y_test": Y, "client_test": OWNER}, {}, "both a split and a test part"),
    ({"split": np.where(OWNER == "mia", "train", split())}, {}, "client mia has no test samples"),
    ({"split": np.where(OWNER == "mia", "test", split())}, {}, "client mia has no training samples"),
    ({"group": np.arange(4)}, {}, "180 items but groups of shape"),
    ({"group": np.zeros(3 * N)}, {}, "client al b. has all its samples in one group"),
    ({"group": Y}, {"partition": "iid", "clients": 3}, "would divide them among clients"),
    ({"group": Y, "x_test": X, "y_test": Y, "client_test": OWNER}, {}, "groups of its training part but not"),
    ({"group": np.arange(3 * N) % 20, "split": split()}, {}, "has both test and other samples"),
    ({}, {"test_from": "given"}, "needs data with a split"),
    ({"split": split()}, {"test_from": "given", "pool": "train"}, "leave pool at merged"),
    ({}, {"test_from": "official", "pool": "train"}, "needs an official test part"),
]


@pytest.mark.parametrize(("own", "settings", "message"), MISTAKES)
def test_a_mistake_raises_a_clear_error(own, settings, message):
    with pytest.raises(CoterieError, match=message) as caught:
        data = from_arrays(X, Y, **{"client": OWNER, **own})
        federate(data, PartitionSettings(**{"partition": "natural", **settings}), 0)
    assert "\n" not in str(caught.value)
