"""Properties of federations: splits, identity, rotation, public items and the official test part."""

import pickle

import numpy as np
import pytest
import torch

from coterie.data import Dataset, PartitionSettings, federate, from_arrays, load_dataset
from coterie.data.rotation import rotate
from coterie.errors import CoterieError


def small_data(n=2000, classes=5, side=6, test=400, owner=None):
    g = np.random.default_rng(1)
    x = g.integers(0, 256, (n, side, side), dtype=np.uint8)
    y = np.r_[np.arange(classes), g.integers(0, classes, n - classes)]
    cut = n - test
    own = {"client": owner[:cut], "client_test": owner[cut:]} if owner is not None else {}
    return from_arrays(x[:cut], y[:cut], x[cut:], y[cut:], name="some", **own)


DATA = small_data()


def fed(seed=0, data=DATA, **kw):
    return federate(data, PartitionSettings(**{"clients": 10, "partition": "dirichlet(0.5)", **kw}), seed)


def all_indices(f, part):
    return torch.cat([f.indices(c, part) for c in f.clients])


@pytest.mark.parametrize("scheme", ["iid", "dirichlet(0.3)", "exdir(2, 1)", "shards(2)", "rotate(3)"])
@pytest.mark.parametrize("stratify", [True, False])
def test_parts_are_disjoint_complete_and_of_the_configured_size(scheme, stratify):
    f = fed(partition=scheme, stratify=stratify)
    every = torch.cat([all_indices(f, p) for p in ("train", "val", "test")])
    assert every.sort().values.equal(torch.arange(len(DATA)))
    total = f.sizes("all")
    assert (f.sizes("test") == np.floor(total * 0.25 + 0.5)).all()
    assert (f.sizes("val") == np.maximum(1, np.floor((total - f.sizes("test")) * 0.1 + 0.5))).all()
    assert all(f.size(c, "train") == len(f.data(c).train) for c in f.clients)


def test_the_smallest_clients_still_train_and_test():
    f = fed(partition="iid", clients=1000, min_size=2)
    assert (f.sizes("train") == 1).all() and (f.sizes("test") == 1).all()
    f = fed(partition="iid", clients=600, min_size=3, test_share=0.99)
    assert f.sizes("train").min() >= 1 and f.sizes("test").min() >= 1


def test_stratified_parts_follow_the_labels_of_the_client_to_one_sample():
    f = fed(test_share=0.3)
    share = f.sizes("test") / f.sizes("all")
    gap = f.label_counts("test") - f.label_counts("all") * share[:, None]
    assert np.abs(gap).max() <= 1
    plain = fed(test_share=0.3, stratify=False)
    gap = plain.label_counts("test") - plain.label_counts("all") * share[:, None]
    assert np.abs(gap).max() > 1


def test_label_counts_agree_with_the_labels_handed_out():
    f = fed()
    for c in (0, 7):
        assert f.label_counts("train")[c].tolist() == f.data(c).label_counts.tolist()
        assert f.label_counts("test")[c].tolist() == torch.bincount(f.test(c).y, minlength=5).tolist()


def test_items_are_standardised_by_the_training_part():
    train = DATA.x[~DATA.is_test].double() / 255
    f = fed()
    index = f.indices(3, "train")
    expected = (DATA.x[index].double() / 255 - train.mean()) / train.std(unbiased=False)
    assert torch.allclose(f.data(3).train.x.double(), expected, atol=1e-5)
    unit = fed(normalize="unit").data(3).train.x
    assert torch.equal(unit, DATA.x[index].float() / 255)
    assert torch.equal(fed(normalize="none").data(3).train.x, DATA.x[index].float())


def test_every_parameter_changes_the_identity():
    base = fed().identity
    changes = {
        "partition": "dirichlet(0.6)",
        "clients": 11,
        "pool": "train",
        "test_share": 0.3,
        "val_share": 0.2,
        "min_size": 11,
        "short": "fill",
        "cap": True,
        "stratify": False,
        "public": 5,
        "public_from": "noise",
        "normalize": "unit",
        "exdir_prior": "normalized",
        "exdir_cap": True,
        "exdir_min_holders": 2,
        "rotate_interp": "nearest",
        "timeline": "swap_labels(3)",
        "scaling": "client",
    }
    assert set(changes) | {"test_from"} == set(PartitionSettings.model_fields)
    for name, value in changes.items():
        assert fed(**{name: value}).identity != base, name
    assert fed(pool="train", test_from="official").identity != fed(pool="train").identity
    assert fed(seed=1).identity["sha256"] != base["sha256"]
    assert fed(data=small_data(n=2001)).identity != base
    assert fed().identity == base


def test_identity_changes_with_the_labels():
    other = Dataset(DATA.name, DATA.x, (DATA.y + 1) % 5, DATA.classes, DATA.is_test, None, DATA.mean, DATA.std)
    plain = {"partition": "iid", "stratify": False}  # dealt and split independently of the labels
    assert torch.equal(fed(data=other, **plain).indices(0, "train"), fed(**plain).indices(0, "train"))
    assert fed(data=other, **plain).identity["sha256"] != fed(**plain).identity["sha256"]


def test_the_training_pool_does_not_touch_the_official_test_part():
    f = fed(pool="train")
    assert not DATA.is_test[torch.cat([all_indices(f, p) for p in ("train", "val", "test")])].any()
    official = f.official()
    assert official is not None and official.y.equal(DATA.y[DATA.is_test])
    assert fed().official() is None


def test_official_test_samples_are_dealt_by_the_class_shares_of_the_clients():
    f = fed(pool="train", test_from="official")
    dealt = all_indices(f, "test")
    assert DATA.is_test[dealt].all() and len(dealt.unique()) == len(dealt) == 400
    own = f.label_counts("train") + f.label_counts("val")
    expected = own / own.sum(axis=0) * f.label_counts("test").sum(axis=0)
    assert np.abs(f.label_counts("test") - expected).max() <= 1
    assert f.sizes("test").min() >= 1


def test_official_test_gives_even_tiny_clients_a_sample():
    f = fed(pool="train", test_from="official", partition="iid", clients=300, min_size=2)
    assert f.sizes("test").min() == 1 and f.sizes("test").sum() == 400


def test_public_items_belong_to_no_client():
    f = fed(public=100)
    mine = torch.cat([all_indices(f, p) for p in ("train", "val", "test")])
    assert len(mine) == len(DATA) - 100
    public = f.data(0).public
    assert public is not None and public.shape == (100, 1, 6, 6)
    left = torch.tensor(sorted(set(range(len(DATA))) - set(mine.tolist())))
    assert torch.equal(public, DATA.ready(left))
    assert fed().data(0).public is None
    test = fed(public=50, public_from="test", pool="train")
    assert len(test.official()) == 350 and test.sizes("all").sum() == 1600
    assert fed(public=7, public_from="noise").public().shape == (7, 1, 6, 6)


def test_rotation_groups_are_those_of_the_paper():
    two = fed(partition="rotate(2)")
    assert [two.rotation(c) for c in two.clients] == [180] * 5 + [0] * 5
    assert two.groups.tolist() == [1] * 5 + [0] * 5
    four = fed(partition="rotate(4)")
    assert [four.rotation(c) for c in four.clients] == [90, 90, 180, 180, 270, 270, 0, 0, 0, 0]
    assert four.groups.tolist() == [1, 1, 2, 2, 3, 3, 0, 0, 0, 0]
    assert fed(partition="rotate(1)").groups.tolist() == [0] * 10
    assert fed().groups is None


def test_rotated_clients_have_rotated_pictures_in_every_part():
    f = fed(partition="rotate(4)", normalize="unit")
    for part, x in (("train", f.data(2).train.x), ("val", f.data(2).val.x), ("test", f.test(2).x)):
        assert torch.equal(x, DATA.x[f.indices(2, part)].flip(2, 3).float() / 255)
    assert torch.equal(f.test(9).x, DATA.x[f.indices(9, "test")].float() / 255)


def test_interpolated_rotation_agrees_with_the_exact_one_and_fills_with_zero():
    x = torch.rand(3, 2, 9, 9)
    near = rotate(x, 90 + 1e-4)
    assert torch.allclose(near[:, :, 1:-1, 1:-1], rotate(x, 90)[:, :, 1:-1, 1:-1], atol=1e-3)
    assert torch.equal(rotate(x, 360), x)
    ones = rotate(torch.ones(1, 1, 9, 9), 45)
    assert ones[0, 0, 0, 0] == 0 and ones[0, 0, 4, 4] == 1
    assert set(rotate(torch.ones(1, 1, 9, 9), 45, "nearest").unique().tolist()) == {0.0, 1.0}


def test_natural_clients_come_from_the_data():
    owner = np.random.default_rng(0).integers(0, 6, 2000)
    f = federate(small_data(owner=owner), PartitionSettings(partition="natural"), 0)
    assert f.clients == tuple(range(6)) and f.identity["clients"] == 6
    assert f.sizes("all").tolist() == np.bincount(owner).tolist()


def test_a_pickled_federation_has_no_cache():
    f = fed()
    before = f.data(1).train.x
    copy = pickle.loads(pickle.dumps(f))
    assert copy._cache == {} and torch.equal(copy.data(1).train.x, before) and copy.identity == f.identity


def test_cache_keeps_ready_tensors_within_its_budget(monkeypatch):
    f = fed()
    assert f.data(0).train.x is f.data(0).train.x
    monkeypatch.setattr("coterie.data.federation.CACHE_BYTES", 0)
    f = fed()
    assert f.data(0).train.x is not f.data(0).train.x


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"clients": 2001}, "more than the number of samples, 2000"),
        ({"partition": "rotate(11)"}, "needs at least as many clients"),
        ({"public": 2000}, "leaves none of"),
        ({"partition": "iid", "clients": 2000, "min_size": 1}, "set min_size to 2"),
        (
            {"partition": "iid", "clients": 500, "min_size": 1, "pool": "train", "test_from": "official"},
            "lower clients",
        ),
    ],
)
def test_impossible_federations_raise_a_clear_error(kw, message):
    with pytest.raises(CoterieError, match=message):
        fed(**kw)


def test_rotation_needs_square_pictures():
    vectors = from_arrays(np.random.rand(100, 3), np.arange(100) % 2)
    with pytest.raises(CoterieError, match="square pictures"):
        federate(vectors, PartitionSettings(partition="rotate(2)", clients=4), 0)
    with pytest.raises(CoterieError, match="official test part"):
        federate(vectors, PartitionSettings(pool="train", test_from="official", clients=4), 0)
    with pytest.raises(CoterieError, match="unknown client 10"):
        fed().data(10)


def test_papers_protocols_work_on_the_embedded_digits():
    digits = load_dataset("digits")
    cpmd = PartitionSettings(partition="dirichlet(0.5)", clients=10, test_share=0.5, val_share=0, min_size=40, cap=True)
    f = federate(digits, cpmd, 0)
    assert f.sizes("all").min() >= 40 and f.sizes("val").sum() == 0
    assert np.abs(f.sizes("test") - f.sizes("train")).max() <= 1
    assert f.data(0).val.x.shape == (0, 1, 8, 8)
    gmh = federate(digits, PartitionSettings(partition="exdir(2, 0.5)", clients=20, stratify=False), 0)
    assert (gmh.label_counts("all") > 0).sum(axis=1).max() <= 2
