"""Metrics: the name and format of a number, and the metrics that the setting `metrics` adds to those of the task.

The value over several clients is that of all their predictions together. Metrics by name are made of counts that add up
over clients; macro_auc and functions of the user are computed from the predictions, which only a simulation has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from coterie.errors import CoterieError, unknown

Counts = dict[str, Tensor]  # counts of one client, summed over samples
Shape = tuple[tuple[int, ...], torch.dtype]
MetricFunction = Callable[[np.ndarray, np.ndarray], float]  # (predictions [n, ...], targets [n, ...]) -> number
CALIBRATION_BINS = 15  # equal ranges of confidence in the calibration error


@dataclass(frozen=True)
class Metric:
    """The name of a number, its format, and the direction in which it improves."""

    name: str
    lower: bool = False  # lower is better
    percent: bool = False  # shown times 100

    @property
    def label(self) -> str:
        """Name of the metric on an axis or in a heading."""
        return f"{self.name} (%)" if self.percent else self.name

    @property
    def heading(self) -> str:
        return f"{self.name} in percent" if self.percent else self.name + (", lower is better" if self.lower else "")

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else 1.0

    def text(self, value: float) -> str:
        """Return a value as tables show it."""
        return f"{100 * value:.1f}" if self.percent else f"{value:.4g}"

    def spread(self, value: float) -> str:
        """Return a standard deviation of values as tables show it."""
        return f"{100 * value:.1f}" if self.percent else f"{value:.2g}"

    def better(self, a: float, b: float) -> bool:
        return a < b if self.lower else a > b

    def worst(self, values: np.ndarray, share: float = 0.1) -> np.ndarray:
        """Return the worst share of the values, at least one value."""
        n = max(1, round(share * len(values)))
        return np.sort(values)[-n:] if self.lower else np.sort(values)[:n]


# ---- metrics by name -------------------------------------------------------------------------------------------------
class AddedMetric(Metric):
    """A metric of the setting `metrics`, computed from the counts `hits` and `total` of classification and its own."""

    needs_predictions: ClassVar[bool] = False
    is_number: ClassVar[bool] = True

    def shapes(self, classes: int) -> dict[str, Shape]:
        """Return names, shapes and types of the counts that this metric adds to a score."""
        return {}

    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        """Return these counts for all samples of a client; outputs [samples, classes]."""
        return {}

    def value(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the metric [clients] from counts [clients, ...]; NaN where it is undefined."""
        raise NotImplementedError

    def wrong(self, counts: Counts) -> str:
        """Return why these counts contradict each other, or an empty string."""
        return ""


class BalancedAccuracy(AddedMetric):
    """The mean over the classes that occur of the share of their samples that are classified correctly."""

    def value(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        return known_mean(share(counts["hits"], counts["total"]))


class MacroF1(AddedMetric):
    """The mean F1 score over the classes that occur or are predicted."""

    def shapes(self, classes: int) -> dict[str, Shape]:
        return {"guessed": ((classes,), torch.int64)}

    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        return {"guessed": torch.bincount(outputs.argmax(1), minlength=outputs.shape[1])}

    def value(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        return known_mean(share(2 * counts["hits"], counts["guessed"] + counts["total"]))

    def wrong(self, counts: Counts) -> str:
        if bool((counts["guessed"] < counts["hits"]).any()) or counts["guessed"].sum() != counts["total"].sum():
            return "a score must have one predicted class for each sample"
        return ""


class Confusion(AddedMetric):
    """The confusion matrix [true class, predicted class]; tables do not show it, because it is not a single number."""

    is_number = False

    def shapes(self, classes: int) -> dict[str, Shape]:
        return {"confusion": ((classes, classes), torch.int64)}

    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        classes = outputs.shape[1]
        cells = torch.bincount(y * classes + outputs.argmax(1), minlength=classes**2)
        return {"confusion": cells.view(classes, classes)}

    def wrong(self, counts: Counts) -> str:
        matrix = counts["confusion"]
        fits = bool((matrix.sum(1) == counts["total"]).all()) and bool((matrix.diagonal() == counts["hits"]).all())
        return "" if fits else "the confusion matrix of a score contradicts its hits"


class CalibrationError(AddedMetric):
    """The expected calibration error (Guo et al., ICML 2017, arXiv:1706.04599).

    Samples are divided by the probability of their predicted class into ranges of equal width; the metric is the mean
    over samples of the distance between accuracy and mean probability of their range.
    """

    def shapes(self, classes: int) -> dict[str, Shape]:
        whole = dict.fromkeys(("bin_samples", "bin_hits"), ((CALIBRATION_BINS,), torch.int64))
        return {**whole, "bin_confidence": ((CALIBRATION_BINS,), torch.float64)}

    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        guess = outputs.argmax(1)
        confidence = outputs.double().softmax(1).gather(1, guess[:, None])[:, 0]
        at = ((confidence.nan_to_num() * CALIBRATION_BINS).ceil().long() - 1).clamp(0, CALIBRATION_BINS - 1)
        return {
            "bin_samples": torch.bincount(at, minlength=CALIBRATION_BINS),
            "bin_hits": torch.bincount(at[guess == y], minlength=CALIBRATION_BINS),
            "bin_confidence": torch.bincount(at, confidence, minlength=CALIBRATION_BINS),
        }

    def value(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        gaps = np.abs(counts["bin_hits"] - counts["bin_confidence"]).sum(1)
        return share(gaps, counts["bin_samples"].sum(1))

    def wrong(self, counts: Counts) -> str:
        samples, hits, confidence = (counts[f"bin_{k}"] for k in ("samples", "hits", "confidence"))
        if samples.sum() != counts["total"].sum() or hits.sum() != counts["hits"].sum() or bool((hits > samples).any()):
            return "the ranges of confidence of a score contradict its hits"
        return "a score has an impossible bin_confidence" if bool((confidence > samples * (1 + 1e-9)).any()) else ""


@dataclass(frozen=True)
class PredictionMetric(AddedMetric):
    """A metric that a function computes from predictions and targets."""

    needs_predictions = True
    function: MetricFunction | None = None  # None where only the name is needed

    def of(self, predictions: np.ndarray, targets: np.ndarray) -> float:
        """Return the value for these samples; NaN if the function raises an exception, as for a single class."""
        try:
            return self.computed(predictions, targets) if len(targets) else np.nan
        except Exception:  # whatever a function of the user raises
            return np.nan

    def computed(self, predictions: np.ndarray, targets: np.ndarray) -> float:
        assert self.function is not None
        return float(self.function(predictions, targets))


def macro_auc(probabilities: np.ndarray, y: np.ndarray) -> float:
    """Return the mean area under the ROC curve of each class versus the rest; classes without samples are left out."""
    from sklearn.metrics import roc_auc_score  # slow to import

    true = [k for k in np.unique(y) if (y != k).any()]
    areas = [roc_auc_score(y == k, probabilities[:, k]) for k in true]
    return float(np.mean(areas)) if areas else np.nan


NAMED_METRICS: dict[str, AddedMetric] = {
    "macro_f1": MacroF1("macro F1"),
    "balanced_accuracy": BalancedAccuracy("balanced accuracy", percent=True),
    "macro_auc": PredictionMetric("macro AUC", function=macro_auc),
    "calibration_error": CalibrationError("calibration error", lower=True),
    "confusion": Confusion("confusion"),
}


# ---- the setting -----------------------------------------------------------------------------------------------------
def check_metrics(given: Any) -> str:
    """Return the setting `metrics` in its usual spelling; raise CoterieError if it is invalid.

    Functions of the user, module:name, are not imported.
    """
    words = given.split(",") if isinstance(given, str) else given
    if not isinstance(words, list | tuple) or not words or not all(isinstance(w, str) and w.strip() for w in words):
        raise CoterieError(f"metrics = {given!r} is invalid: it must be names, separated by commas")
    words = [w.strip() for w in words]
    for name in words:
        if ":" not in name and name not in NAMED_METRICS:
            raise unknown("metric", name, NAMED_METRICS)
    titles = [m.name for m in added_metrics(",".join(words))]
    if twice := [t for t in titles if titles.count(t) > 1]:
        raise CoterieError(f"metrics = {','.join(words)} is invalid: it names {twice[0]} twice")
    return ",".join(words)


def metric_paths(setting: str | None) -> list[str]:
    """Return the functions of the user, module:name, in the setting `metrics`."""
    return [name for name in (setting or "").split(",") if ":" in name]


def metric_key(path: str) -> str:
    """Return the name under which a run keeps a function of the user that computes a metric."""
    return f"metrics {path}"


def added_metrics(setting: str | None, functions: Mapping[str, MetricFunction] | None = None) -> list[AddedMetric]:
    """Return the metrics that the setting names, with the functions of the user by module:name if they are given."""
    own = functions or {}
    words = setting.split(",") if setting else []
    return [
        NAMED_METRICS.get(w) or PredictionMetric(w.split(":")[-1].split(".")[-1], function=own.get(w)) for w in words
    ]


def check_counts_suffice(setting: str | None) -> None:
    """Raise CoterieError if a metric needs more than the counts that the devices of a federation send."""
    for word, metric in zip((setting or "").split(","), added_metrics(setting), strict=False):
        if metric.needs_predictions:
            raise CoterieError(
                f"metrics = {word} needs the predictions for every sample, and the devices of a federation send only "
                "counts; such a metric is for simulations"
            )


def check_function(metric: PredictionMetric, path: str, predictions: np.ndarray, targets: np.ndarray) -> None:
    """Raise CoterieError if a function of the user does not return a number for predictions of the initial model."""
    try:
        metric.computed(predictions, targets)
    except Exception as e:  # whatever a function of the user raises
        why = (str(e).splitlines() or [""])[0][:200]
        raise CoterieError(f"metrics = {path} cannot be computed: {type(e).__name__}: {why}") from None


# ---- arithmetic ------------------------------------------------------------------------------------------------------
def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole; NaN where the whole is 0."""
    there = whole > 0
    return np.where(there, part / np.where(there, whole, 1), np.nan)


def known_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis, ignoring NaN; NaN if all values are NaN."""
    there = ~np.isnan(values)
    return share(np.where(there, values, 0).sum(-1), there.sum(-1))
