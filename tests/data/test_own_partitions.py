"""Partitions of the user: arrays of sample numbers, or a function that returns them."""

from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.data.arrays import from_arrays, with_partition
from coterie.data.dataset import Dataset
from coterie.data.federation import PartitionSettings, federate
from coterie.errors import CoterieError


def numbers(n: int = 60) -> Dataset:
    return from_arrays(np.arange(2 * n, dtype=np.float32).reshape(n, 2) / n, np.arange(n) % 3)


def test_every_client_has_the_samples_of_its_array() -> None:
    data = with_partition(numbers(), [np.arange(20), np.arange(59, 29, -1)])  # 20 to 29 belong to no client
    fed = federate(data, PartitionSettings(partition="natural"), seed=0)
    held = [np.sort(np.concatenate([fed.indices(i, p).numpy() for p in ("train", "val", "test")])) for i in (0, 1)]
    first = numbers().x[:, 0].numpy()
    np.testing.assert_array_equal(data.x[held[0], 0], first[:20])
    np.testing.assert_array_equal(data.x[held[1], 0], first[30:])


def test_a_run_takes_a_list_or_a_function_of_the_targets(tmp_path: Path) -> None:
    def by_label(y: np.ndarray) -> list[np.ndarray]:
        return [np.flatnonzero(y != k) for k in (0,)] + [np.flatnonzero(y == 0)]

    runs = [
        coterie.run("fedavg", numbers(), partition=p, rounds=1, workers=1, min_size=1, out=tmp_path / str(i))
        for i, p in enumerate((by_label, by_label(numbers().y.numpy())))
    ]
    assert runs[0].events[-1]["eval"] == runs[1].events[-1]["eval"]
    assert runs[0].session().federation.sizes("all").tolist() == [40, 20]


@pytest.mark.parametrize(
    ("partition", "sentence"),
    [
        ([np.arange(20), np.arange(19, 30)], "a sample of client 1 is named twice"),
        ([[0, 0]], "a sample of client 0 is named twice"),
        ([[0, 60]], "client 0 has samples from 0 to 60, and the data have 60"),
        ([[0.5]], "client 0 must have an array of sample numbers"),
        ([], "partition names no clients"),
        (5, "partition must be a list of arrays of sample numbers"),
        (lambda y: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_partition_gets_one_sentence(partition, sentence) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CoterieError, match=sentence):
        with_partition(numbers(), partition)
