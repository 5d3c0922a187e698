"""Classifier and regressor in the style of scikit-learn: one personal model for each client."""

import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from coterie.api import run
from coterie.data.arrays import from_arrays
from coterie.data.dataset import Array
from coterie.errors import CoterieError
from coterie.export.personal_model import Predictions, Predictor


class PersonalisedEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Common part of PersonalisedClassifier and PersonalisedRegressor.

    All rows that `fit` gets are training rows, except for `val_share` of each client's rows, and all clients take part
    in every round. `settings` has further settings of `coterie.run`, such as {"join": 0.5}. Nothing is left
    on disk unless `out` names a folder for the run.

    After `fit`: `models_` (a `Predictor` by client), `clients_` (sorted), `n_features_in_` and `n_iter_` (rounds).
    """

    def __init__(
        self, method: Any = "fedper", model: Any = None, *, rounds: int = 20, epochs: int = 2, batch: int = 32,
        lr: float = 0.05, val_share: float = 0.0, settings: dict[str, Any] | None = None, random_state: Any = 0,
        workers: int = 1, out: str | Path | None = None,
    ):  # fmt: skip
        self.method, self.model, self.rounds, self.epochs, self.batch, self.lr = (
            method,
            model,
            rounds,
            epochs,
            batch,
            lr,
        )
        self.val_share, self.settings, self.random_state = val_share, settings, random_state
        self.workers, self.out = workers, out

    def _fit(self, x: Array, y: Array, clients: Any, task: str, classes: list[str] | None) -> Self:
        owner = self._owners(clients, len(x), fitted=False)
        names, first, number, rows = np.unique(owner, return_index=True, return_inverse=True, return_counts=True)
        if rows.min() < 2:
            raise CoterieError(f"client {names[rows.argmin()]} has 1 row; every client needs at least two")
        # a run scores every client on test rows; here each client has one, which is a copy and not used
        data = from_arrays(
            x, y, x[first], y[first], name=type(self).__name__, classes=classes, task=task, client=number,
            client_test=np.arange(len(names)), items="numbers" if x.ndim == 2 else None,
        )  # fmt: skip
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31)
        usual = {"join": 1.0, "eval_every": self.rounds, "watch": False, "final_trained": False}
        with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
            result = run(
                self.method, data, self.model, rounds=self.rounds, epochs=self.epochs, batch=self.batch, lr=self.lr,
                val_share=self.val_share, min_size=1, seed=int(seed), workers=self.workers,
                progress=False, out=self.out or Path(folder) / "run", **{**usual, **(self.settings or {})},
            )  # fmt: skip
            saved = [result.predictor(i) for i in range(len(names))]
        self.models_: dict[Any, Predictor] = dict(zip(names.tolist(), saved, strict=True))
        self.clients_, self.n_iter_ = names, result.last_round
        return self

    def _owners(self, clients: Any, n: int, fitted: bool = True) -> Array:
        """Return the client of each of n rows; a single client stands for all rows, and None for the only client."""
        if clients is None and fitted and len(self.clients_) > 1:
            raise CoterieError(f"name the client of each row (clients=...): the model has {len(self.clients_)} clients")
        owner = np.asarray((self.clients_[0] if fitted else 0) if clients is None else clients)
        owner = np.full(n, owner) if owner.ndim == 0 else owner
        if owner.shape != (n,):
            raise CoterieError(f"clients has shape {owner.shape} for {n} rows; give one client, or one for each row")
        return owner

    def _predict(self, X: Any, clients: Any) -> tuple[Array, list[tuple[Array, Predictions]]]:
        """Return the client of each row, and row numbers and predictions by client."""
        check_is_fitted(self)
        x = _items(validate_data(self, X, reset=False, allow_nd=True))
        owner, parts = self._owners(clients, len(x)), []
        for name in np.unique(owner).tolist():
            if name not in self.models_:
                known = ", ".join(map(str, [*self.models_][:5])) + (", ..." if len(self.models_) > 5 else "")
                raise CoterieError(f"unknown client {name!r}; the clients of the model are {known}")
            rows = np.flatnonzero(owner == name)
            parts.append((rows, self.models_[name].predict(x[rows])))
        return owner, parts

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags


class PersonalisedClassifier(ClassifierMixin, PersonalisedEstimator):  # type: ignore[misc]
    """A classifier with one model for each client. PersonalisedEstimator documents parameters and attributes."""

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train the clients together. `clients` names the client of each row; None means one client."""
        X, y = validate_data(self, X, y, allow_nd=True, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("a classifier needs at least two classes, and y has one class")  # as in scikit-learn
        return self._fit(_items(X), codes, clients, "classification", [str(c) for c in self.classes_])

    def predict_proba(self, X: Any, clients: Any = None) -> Array:
        """Return probabilities [rows, classes] in the order of `classes_`, each row by its client's model."""
        owner, parts = self._predict(X, clients)
        out = np.zeros((len(owner), len(self.classes_)), np.float32)
        for rows, found in parts:
            out[rows] = found.proba
        return out

    def predict(self, X: Any, clients: Any = None) -> Array:
        """Return the most probable class of each row by the model of its client."""
        probabilities = self.predict_proba(X, clients)
        predicted: Array = self.classes_[probabilities.argmax(1)]
        return predicted

    def score(self, X: Any, y: Any, clients: Any = None) -> float:
        """Return the accuracy over all rows."""
        return float(accuracy_score(y, self.predict(X, clients)))


class PersonalisedRegressor(RegressorMixin, PersonalisedEstimator):  # type: ignore[misc]
    """A regressor with one model for each client. PersonalisedEstimator documents parameters and attributes."""

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train the clients together. `clients` names the client of each row; None means one client.

        Models are trained on targets that are standardised over all rows.
        """
        X, y = validate_data(self, X, y, allow_nd=True, y_numeric=True, multi_output=True, ensure_min_samples=2)
        y = column_or_1d(y, warn=True).astype(np.float64)
        self.target_mean_, self.target_scale_ = float(y.mean()), float(y.std()) or 1.0
        return self._fit(_items(X), (y - self.target_mean_) / self.target_scale_, clients, "regression", None)

    def predict(self, X: Any, clients: Any = None) -> Array:
        """Return the predicted number of each row by the model of its client."""
        owner, parts = self._predict(X, clients)
        out = np.zeros(len(owner))
        for rows, found in parts:
            out[rows] = found.values[:, 0]
        return out * self.target_scale_ + self.target_mean_

    def score(self, X: Any, y: Any, clients: Any = None) -> float:
        """Return the coefficient of determination R² over all rows."""
        return float(r2_score(y, self.predict(X, clients)))


def _items(x: Array) -> Array:
    """Return rows of numbers as floats; pictures and signals are returned as they are."""
    return x.astype(np.float32) if x.ndim == 2 else x
