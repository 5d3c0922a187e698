"""Data are taken as the user gives them: kinds of items and targets, scales, client ids, splits and test parts."""

import numpy as np
import pytest
import scipy.sparse
import torch
from PIL import Image

import coterie
from coterie.config import settings
from coterie.data.arrays import from_arrays, items_like
from coterie.data.federation import federate
from coterie.data.sources import load_dataset, save_dataset
from coterie.data.target_types import with_task
from coterie.engine.session import Objects, follow_data, prepare
from coterie.errors import CoterieError

rng = np.random.default_rng(0)
N = 80
CLASSES = np.arange(N) % 2


def divided(data, **chosen):
    s = follow_data(settings("fedavg", **chosen), data, Objects(dataset=data))
    return federate(data, s.federation, 0)


def train_values(fed):
    return torch.cat([fed.data(i).train.x for i in fed.clients])


# ---- items -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.int32, np.float32, np.float64])
def test_pictures_beyond_bytes_are_standardised_on_training_samples(dtype) -> None:
    x = (rng.random((N, 12, 12)) * 3000).astype(dtype)
    fed = divided(from_arrays(x, CLASSES), partition="iid", clients=2)
    assert fed.shape == (1, 12, 12) and abs(float(train_values(fed).mean())) < 1e-3
    assert abs(float(train_values(fed).std()) - 1) < 1e-2 and "standardised" in fed.choices[0]
    raw = items_like("new", x[:3], fed.dataset.x.dtype, fed.shape)  # prediction reads the same arrays the same way
    assert torch.equal(raw, fed.dataset.x[:3])


def test_columns_of_different_scale_are_standardised_and_others_stay() -> None:
    x = np.stack([rng.random(N), 1000 + 50 * rng.random(N), 1e-4 * rng.random(N)], 1)
    fed = divided(from_arrays(x, CLASSES), partition="iid", clients=2)
    train = torch.cat([fed.indices(i, "train") for i in fed.clients])
    seen = train_values(fed)
    assert (
        torch.equal(seen[:, 0], torch.from_numpy(x.astype(np.float32))[train, 0]) and "2 of 3 columns" in fed.choices[0]
    )
    assert torch.allclose(seen[:, 1:].mean(0), torch.zeros(2), atol=1e-3)
    assert torch.allclose(seen[:, 1:].std(0, unbiased=False), torch.ones(2), atol=1e-3)
    assert divided(from_arrays(x, CLASSES), partition="iid", clients=2, normalize="none").dataset.mean is None
    usual = from_arrays(rng.normal(size=(N, 3)), CLASSES)
    assert divided(usual, partition="iid", clients=2).dataset is usual


def test_unit_is_refused_for_floats_beyond_0_and_1() -> None:
    with pytest.raises(CoterieError, match="normalize = unit divides bytes by 255"):
        divided(from_arrays(rng.normal(size=(N, 3)), CLASSES), normalize="unit")


def test_matrices_of_whole_numbers_are_said_to_be_tokens_unless_their_kind_is_named() -> None:
    x = rng.integers(0, 50, (N, 4))
    tokens = from_arrays(x, CLASSES)
    assert tokens.x.dtype == torch.int64 and "taken for token ids" in tokens.notes[0]
    assert from_arrays(x, CLASSES, items="tokens").notes == ()
    numbers = from_arrays(x, CLASSES, items="numbers")
    assert (
        numbers.x.dtype == torch.float32
        and numbers.notes == ()
        and torch.equal(numbers.x[0], torch.tensor(x[0]).float())
    )
    flags = from_arrays(x > 25, CLASSES)
    assert flags.x.dtype == torch.float32 and set(flags.x.unique().tolist()) == {0.0, 1.0}
    with pytest.raises(CoterieError, match="some are negative"):
        from_arrays(-x, CLASSES)
    with pytest.raises(CoterieError, match="unknown kind of items"):
        from_arrays(x, CLASSES, items="token")


def test_float_grey_pictures_are_pictures_and_long_items_are_signals() -> None:
    assert from_arrays(rng.random((N, 24, 20)), CLASSES).shape == (1, 24, 20)
    assert "grey pictures" in from_arrays(rng.random((N, 24, 20)), CLASSES).notes[0]
    assert from_arrays(rng.random((N, 24, 20)), CLASSES, items="signals").shape == (20, 24)
    assert from_arrays(rng.random((N, 64, 9)), CLASSES).shape == (9, 64)


def test_16_bit_pictures_of_a_folder_keep_their_values(tmp_path) -> None:
    values = (rng.random((4, 9, 9)) * 60000).astype(np.uint16)
    for i, v in enumerate(values):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(v).save(tmp_path / "ab"[i % 2] / f"{i}.png")
    data = load_dataset(str(tmp_path))
    assert data.shape == (1, 9, 9) and torch.equal(data.x[0, 0], torch.from_numpy(values[0].astype(np.float32)))
    Image.fromarray((values[0] >> 8).astype(np.uint8)).save(tmp_path / "a" / "z.png")
    with pytest.raises(CoterieError, match="pictures must have one depth"):
        load_dataset(str(tmp_path))


def test_sparse_items_are_read_and_masked_values_are_refused() -> None:
    dense = rng.random((N, 5)) * (rng.random((N, 5)) > 0.5)
    assert torch.equal(from_arrays(scipy.sparse.csr_matrix(dense), CLASSES).x, from_arrays(dense, CLASSES).x)
    with pytest.raises(CoterieError, match="x of arrays: some values are masked"):
        from_arrays(np.ma.masked_array(dense, dense == 0), CLASSES)
    assert len(from_arrays(np.ma.masked_array(dense), CLASSES)) == N


# ---- targets ---------------------------------------------------------------------------------------------------------
def test_many_whole_floats_are_numbers_and_many_whole_numbers_are_said_to_be_classes() -> None:
    x, many = rng.random((N, 3)), np.arange(N) * 7
    numbers = from_arrays(x, many.astype(float))
    assert numbers.kind == "regression" and "taken for numbers" in numbers.target_notes[0]
    assert from_arrays(x, CLASSES.astype(float)).kind == "classification"
    assert with_task(numbers, "classification").kind == "classification"
    classes = from_arrays(x, many)
    assert classes.kind == "classification" and "taken for classes" in classes.target_notes[0]
    assert (
        with_task(classes, "regression").target_notes == from_arrays(x, many, task="classification").target_notes == ()
    )
    assert from_arrays(np.repeat(x, 10, 0), np.repeat(np.arange(N), 10)).target_notes == ()  # 0..79, ten items each


def test_negative_labels_are_said_and_one_class_is_refused() -> None:
    x = rng.random((N, 3))
    assert "contain -1, which is taken for a class" in from_arrays(x, np.arange(N) % 3 - 1).target_notes[0]
    assert from_arrays(x, 2 * CLASSES - 1).target_notes == ()
    with pytest.raises(CoterieError, match="all items of arrays have the same class"):
        divided(from_arrays(x, np.zeros(N, int)))


def test_unscaled_targets_of_a_regression_are_said() -> None:
    x, y = rng.random((N, 3)), rng.normal(200_000, 10_000, N)
    assert any(
        "targets of arrays have mean " in n for n in divided(from_arrays(x, y), partition="iid", clients=2).notes
    )
    assert divided(from_arrays(x, (y - 200_000) / 10_000), partition="iid", clients=2).notes == ()


# ---- clients, splits and test parts ----------------------------------------------------------------------------------
def test_client_ids_mean_a_natural_partition_unless_another_one_is_named() -> None:
    data = from_arrays(rng.random((N, 3)), CLASSES, client=np.repeat(["a", "b", "c", "d"], N // 4))
    assert divided(data).names == ("a", "b", "c", "d")
    assert len(divided(data, partition="iid", clients=3).clients) == 3


def test_an_official_test_part_of_own_data_is_kept_for_testing() -> None:
    data = from_arrays(rng.random((N, 3)), CLASSES, rng.random((40, 3)), np.arange(40) % 2)
    fed = divided(data, partition="iid", clients=2)
    assert sorted(torch.cat([fed.indices(i, "test") for i in fed.clients]).tolist()) == list(range(N, N + 40))
    assert divided(data, partition="iid", clients=2, pool="merged").identity["test_from"] == "own"


def test_missing_client_ids_are_refused_and_small_clients_are_said() -> None:
    x = rng.random((N, 3))
    for ids, word in (([0.0, np.nan], "nan"), (["a", None], "None"), (["a", ""], "an empty text")):
        with pytest.raises(CoterieError, match=f"client ids of arrays contain {word}"):
            from_arrays(x, CLASSES, client=np.array(ids * (N // 2), dtype=object if None in ids else None))
    data = from_arrays(x, CLASSES, client=["big"] * 40 + ["large"] * 35 + ["tiny"] * 5)
    assert "1 of 3 clients of arrays with 5 samples are left out (tiny)" in divided(data).notes[0]
    assert divided(data, min_size=2).notes == ()


def test_a_stored_data_set_needs_no_guesses(tmp_path) -> None:
    for x in (rng.integers(0, 9, (N, 4)), rng.random((N, 24, 20)), rng.random((N, 4))):
        data = from_arrays(x, np.arange(N) * 7)
        save_dataset(data, tmp_path / "stored.npz")
        again = load_dataset(str(tmp_path / "stored.npz"))
        assert again.digest == data.digest and again.kind == data.kind and again.notes == again.target_notes == ()


# ---- warnings are shown ----------------------------------------------------------------------------------------------
def test_warnings_are_logged_stored_and_shown_with_the_run(tmp_path, caplog) -> None:
    data = from_arrays(rng.random((N, 3)), np.arange(N) * 7, client=np.arange(N) % 4)
    run = coterie.run("fedavg", data, out=tmp_path / "a", rounds=1, epochs=1, workers=1)
    assert any("taken for classes" in w for w in run.warnings())
    assert sum("taken for classes" in r.getMessage() for r in caplog.records) == 1
    assert coterie.open_run(tmp_path / "a").settings["federation"]["partition"] == "natural"


def test_a_softmax_or_sigmoid_at_the_end_of_a_model_is_said() -> None:
    data = from_arrays(rng.random((N, 3)), CLASSES)
    for end, word in ((torch.nn.Softmax(1), "softmax"), (torch.nn.Sigmoid(), "sigmoid"), (torch.nn.Identity(), "")):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), end)
        s = settings("fedavg", partition="iid", clients=2)
        warned = prepare(s, objects=Objects(dataset=data, model=model)).warnings()
        assert [f"ends in a {word}" in w for w in warned] == ([True] if word else [])


def test_a_comparison_repeats_and_continues_with_what_the_data_decided(tmp_path) -> None:
    data = from_arrays(rng.random((N, 3)), CLASSES, client=np.arange(N) % 4)
    for _ in range(2):  # the second call takes the finished runs
        table = coterie.compare(["fedavg"], data, out=tmp_path / "c", rounds=1, epochs=1, workers=1)
    assert table.runs[0].client_names == ["0", "1", "2", "3"]
