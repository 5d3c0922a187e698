"""Properties of partitions, and errors for impossible ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coterie.data.partition import deal
from coterie.data.partition_spec import parse_scheme
from coterie.data.settings import PartitionSettings
from coterie.errors import CoterieError

LABELS = np.random.default_rng(0).integers(0, 10, 4000)


def dealt(partition, clients=20, seed=0, labels=LABELS, owner=None, classes=10, **kw):
    return deal(labels, owner, classes, clients, PartitionSettings(partition=partition, **kw), seed)


def counts(client, labels=LABELS, classes=10):
    return np.bincount(client * classes + labels, minlength=(client.max() + 1) * classes).reshape(-1, classes)


@pytest.mark.parametrize("scheme", ["iid", "dirichlet(0.1)", "exdir(2, 0.5)", "labels(3)", "shards(2)", "rotate(4)"])
@pytest.mark.parametrize("cap", [False, True])
def test_every_sample_goes_to_one_client_and_every_client_has_the_minimum(scheme, cap):
    client = dealt(scheme, min_size=15, cap=cap, exdir_cap=cap)
    assert client.shape == LABELS.shape and client.min() == 0 and client.max() == 19
    assert np.bincount(client, minlength=20).min() >= 15


@given(
    scheme=st.sampled_from(["iid", "dirichlet(0.5)", "exdir(3, 1)", "labels(2)", "shards(3)", "rotate(2, 5)"]),
    clients=st.integers(1, 12),
    n=st.integers(60, 400),
    seed=st.integers(0, 5),
    cap=st.booleans(),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_a_partition_is_complete_or_raises_a_clear_error(scheme, clients, n, seed, cap):
    labels = np.random.default_rng(n).integers(0, 5, n)
    try:
        client = dealt(scheme, clients, seed, labels, classes=5, min_size=3, cap=cap)
    except CoterieError as e:
        assert "\n" not in str(e)
        return
    sizes = np.bincount(client, minlength=clients)
    assert len(sizes) == clients and sizes.sum() == n and sizes.min() >= 3


def test_the_partition_is_a_function_of_the_seed():
    for scheme in ("iid", "dirichlet(0.3)", "exdir(2, 0.5)", "labels(2)", "shards(2)"):
        assert (dealt(scheme, seed=3) == dealt(scheme, seed=3)).all()
        assert (dealt(scheme, seed=3) != dealt(scheme, seed=4)).any()


def test_iid_sizes_differ_by_one_at_most():
    sizes = np.bincount(dealt("iid", 7))
    assert sizes.max() - sizes.min() <= 1


def test_dirichlet_is_more_uneven_for_smaller_alpha():
    def largest_share(alpha):
        c = counts(dealt(f"dirichlet({alpha})", min_size=1))
        return (c.max(axis=1) / c.sum(axis=1)).mean()

    assert largest_share(0.1) > largest_share(1.0) + 0.1 > largest_share(1000) + 0.2


def test_capped_clients_get_no_more_classes():
    c = counts(dealt("dirichlet(0.1)", cap=True, min_size=1))
    before = np.cumsum(c, axis=1) - c  # held when each class was dealt
    assert c[before >= len(LABELS) / 20].sum() == 0
    uncapped = counts(dealt("dirichlet(0.1)", cap=False, min_size=1))
    before = np.cumsum(uncapped, axis=1) - uncapped
    assert uncapped[before >= len(LABELS) / 20].sum() > 0


@pytest.mark.parametrize("prior", ["indicator", "normalized"])
def test_exdir_gives_at_most_c_labels_and_every_label_enough_holders(prior):
    for C in (2, 5):
        c = counts(dealt(f"exdir({C}, 5)", min_size=2, exdir_prior=prior))
        assert (c > 0).sum(axis=1).max() <= C
        assert c.sum() == len(LABELS)


def test_exdir_label_draw_honours_the_minimum_of_holders():
    from coterie.data.partition import _holders

    for least in (1, 4, None):  # None: half of an even spread of 20
        s = PartitionSettings(partition="exdir(2, 0.5)", exdir_min_holders=least)
        for seed in range(5):
            holds = _holders(2, 10, 100, s, seed)
            assert (holds.sum(axis=0) == 2).all() and holds.sum(axis=1).min() >= (10 if least is None else least)


def test_exdir_without_the_cap_keeps_more_of_the_drawn_labels():
    """A capped client gets nothing of the labels that are dealt later, so it has fewer than C."""
    labels = np.random.default_rng(1).integers(0, 100, 60_000)
    few = [
        ((counts(dealt("exdir(5, 0.5)", 100, labels=labels, classes=100, exdir_cap=cap), labels, 100) > 0).sum(1) < 5)
        for cap in (True, False)
    ]
    assert few[0].sum() > 2 * few[1].sum()


@pytest.mark.parametrize("clients, k", [(20, 2), (10, 1), (5, 2), (7, 3)])
def test_labels_gives_k_labels_to_each_client_and_equal_parts_of_a_class_to_its_holders(clients, k):
    c = counts(dealt(f"labels({k})", clients))
    assert ((c > 0).sum(axis=1) == k).all() and c.sum() == len(LABELS)
    for column in c.T:  # a class over the clients
        held = column[column > 0]
        assert len(held) and held.max() - held.min() <= 1


def test_exdir_with_all_labels_and_no_cap_deals_every_class_to_every_client():
    c = counts(dealt("exdir(10, 100)", exdir_cap=False))
    assert (c > 0).all()


def test_shards_give_each_client_few_labels_and_equal_sizes():
    labels = np.repeat(np.arange(10), 400)  # 40 shards of 100: each has one label
    c = counts(dealt("shards(2)", labels=labels), labels)
    assert (c > 0).sum(axis=1).max() <= 2
    assert (c.sum(axis=1) == 200).all()


def test_natural_keeps_owners_together_and_leaves_small_ones_out():
    owner = np.repeat([7, 3, 9], [100, 50, 4])
    client = dealt("natural", labels=np.zeros(154, int), owner=owner, min_size=10)
    assert (client[owner == 3] == 0).all() and (client[owner == 7] == 1).all() and (client[owner == 9] == -1).all()


def test_fill_brings_every_client_to_the_minimum():
    s = {"clients": 100, "min_size": 20}
    with pytest.raises(CoterieError, match=r"short = fill"):
        dealt("dirichlet(0.05)", **s)
    filled = np.bincount(dealt("dirichlet(0.05)", short="fill", **s), minlength=100)
    assert filled.min() == 20 and filled.sum() == len(LABELS)


def test_a_hundred_thousand_clients_are_dealt_quickly():
    import time

    labels = np.random.default_rng(0).integers(0, 10, 1_000_000)
    start = time.process_time()
    client = dealt("dirichlet(0.1)", 100_000, labels=labels, short="fill", min_size=2)
    assert np.bincount(client, minlength=100_000).min() >= 2
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"partition": "dirichlet(0)"}, "alpha .* must be above 0"),
        ({"partition": "dirichlet(-1)"}, "above 0"),
        ({"partition": "dirichlet(nan)"}, "above 0"),
        ({"partition": "dirichlet(x)"}, "must be a number"),
        ({"partition": "dirichlet"}, "needs alpha, for example"),
        ({"partition": "dirichlet(1, 2)"}, "too many values"),
        ({"partition": "dirichlet(beta=2)"}, 'unknown parameter .*"beta"'),
        ({"partition": "dirichle(0.1)"}, 'did you mean "dirichlet"'),
        ({"partition": "dirichlet 0.1"}, "not of the form"),
        ({"partition": "shards(1.5)"}, "whole number"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"test_share": 1}, "test_share must lie between 0 and 1"),
        ({"test_share": 0}, "test_share"),
        ({"val_share": -0.1}, "val_share"),
        ({"min_size": 0}, "min_size"),
        ({"public": -1}, "public"),
        ({"test_from": "official"}, "needs pool = train"),
        ({"public": 5, "public_from": "test"}, "needs pool = train"),
        ({"partition": "iid", "short": "fill"}, "short = fill"),
        ({"tes_share": 0.5}, 'did you mean "test_share"'),
    ],
)
def test_impossible_settings_raise_a_clear_error(kw, message):
    with pytest.raises(CoterieError, match=message) as e:
        PartitionSettings(**kw)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("scheme", "kw", "message"),
    [
        ("iid", {"clients": 5000}, "clients = 5000 is more than the number of samples, 4000"),
        ("iid", {"clients": 1000}, "min_size"),
        ("exdir(11, 1)", {}, "11 labels per client, but the data have 10 classes"),
        ("exdir(1, 1)", {"clients": 5, "min_size": 1}, "holders"),
        ("labels(11)", {}, "11 labels per client, but the data have 10 classes"),
        ("labels(1)", {"clients": 5}, "leaves some of 10 classes without a client"),
        ("shards(300)", {}, "needs 6000 shards"),
        ("shards(2)", {"clients": 300, "min_size": 13}, "min_size = 13"),
        ("dirichlet(0.01)", {"clients": 100}, "in each of .* draws; raise alpha"),
        ("natural", {}, "name their clients"),
    ],
)
def test_impossible_partitions_raise_a_clear_error(scheme, kw, message):
    with pytest.raises(CoterieError, match=message) as e:
        dealt(scheme, **kw)
    assert "\n" not in str(e.value)


def test_schemes_are_read_in_every_spelling():
    assert parse_scheme(" exdir( C=2 , alpha=0.5 ) ") == parse_scheme("exdir(2, 0.5)") == parse_scheme("ExDir(2,0.50)")
    assert str(parse_scheme("rotate(4)")) == "rotate(4, 1)"
    assert str(parse_scheme("iid")) == "iid"
