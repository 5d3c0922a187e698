"""Estimators in the style of scikit-learn."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.utils.estimator_checks import check_estimator

import coterie
from coterie.errors import CoterieError

X, Y = load_iris(return_X_y=True)
NAMES = np.array(["north", "south"])[np.arange(len(X)) % 2]

# checks of scikit-learn that do not apply, with the reason
SKIPPED = {"check_array_api_input": "scikit-learn skips it unless SCIPY_ARRAY_API is set"}


@pytest.mark.long
@pytest.mark.parametrize("kind", [coterie.PersonalisedClassifier, coterie.PersonalisedRegressor])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks_pass(kind: Any) -> None:
    found = check_estimator(kind(rounds=5), on_fail=None, on_skip=None)
    not_passed = {r["check_name"]: r["exception"] for r in found if r["status"] != "passed"}
    assert not_passed.keys() <= SKIPPED.keys(), not_passed


def test_each_row_is_predicted_by_the_model_of_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    labels = np.array(["setosa", "versicolor", "virginica"])[Y]
    made = coterie.PersonalisedClassifier(rounds=3, epochs=1).fit(X, labels, clients=NAMES)
    assert not [*tmp_path.iterdir()]  # nothing stays on disk
    assert made.clients_.tolist() == ["north", "south"] and made.classes_.tolist() == sorted(set(labels))
    proba = made.predict_proba(X, clients=NAMES)
    for name in made.clients_:
        rows = name == NAMES
        expected = made.models_[name].predict(X[rows].astype(np.float32)).proba
        assert np.array_equal(proba[rows], expected)
        assert np.array_equal(made.predict_proba(X[rows], clients=name), expected)
    assert not np.array_equal(made.predict_proba(X, "north"), made.predict_proba(X, "south"))
    predicted = made.predict(X, clients=NAMES)
    assert np.array_equal(predicted, made.classes_[proba.argmax(1)])
    assert made.score(X, labels, clients=NAMES) == (predicted == labels).mean()
    again = clone(made).fit(X, labels, clients=NAMES)
    assert np.array_equal(again.predict_proba(X, clients=NAMES), proba)


def test_all_rows_are_training_rows_as_in_a_run(tmp_path: Path) -> None:
    made = coterie.PersonalisedClassifier("local", rounds=2, out=tmp_path / "r").fit(X, Y, clients=NAMES)
    run = coterie.open_run(tmp_path / "r", data=None)
    assert run.finished and run.settings["federation"]["val_share"] == 0 and made.n_iter_ == 2
    assert run.rounds["samples"].sum() == 2 * 2 * len(X)  # rounds, epochs


def test_targets_are_predicted_in_their_units() -> None:
    x, y = load_diabetes(return_X_y=True)
    x = x / x.std(0)
    one = coterie.PersonalisedRegressor(rounds=3).fit(x, y)
    scaled = coterie.PersonalisedRegressor(rounds=3).fit(x, 8 * y + 1024)
    assert one.score(x, y) > 0.3 and one.clients_.tolist() == [0]
    assert np.allclose(scaled.predict(x), 8 * one.predict(x) + 1024, rtol=1e-4)


def test_wrong_clients_get_a_sentence() -> None:
    with pytest.raises(CoterieError, match="client b has 1 row; every client needs at least two"):
        coterie.PersonalisedClassifier().fit(X, Y, clients=["a"] * (len(X) - 1) + ["b"])
    made = coterie.PersonalisedClassifier("local", rounds=1, epochs=1).fit(X, Y, clients=NAMES)
    for clients, sentence in (
        (None, r"name the client of each row .* the model has 2 clients"),
        ("west", r"unknown client 'west'; the clients of the model are north, south"),
        (NAMES[:3], r"clients has shape \(3,\) for 150 rows"),
    ):
        with pytest.raises(CoterieError, match=sentence):
            made.predict(X, clients=clients)
