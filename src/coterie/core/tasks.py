"""Tasks: the form of targets, the loss, the counts of a score, and the metrics computed from these counts.

A task is chosen by the data or by the setting `task`. Counts are sums over samples (or over pairs of samples of one
client), so that those of several clients may be added; targets and predictions themselves are never part of a score.
Outputs of a model are [batch, outputs]; targets are classes [batch] or numbers [batch, ...].
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.metrics import (
    NAMED_METRICS,
    AddedMetric,
    Counts,
    Metric,
    MetricFunction,
    PredictionMetric,
    Shape,
    added_metrics,
    known_mean,
    share,
)
from coterie.errors import CoterieError, unknown

PAIRS = 1024  # rows of a table of pairs that are compared in one step
MOST_SAMPLES = 10**9  # largest number of samples of a client


@dataclass(frozen=True)
class Task(ABC):
    outputs: int  # outputs of a model per item
    added: tuple[AddedMetric, ...] = ()  # metrics of the setting `metrics`

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]  # the first metric decides and is shown first
    whole: ClassVar[bool] = False  # True if the loss of a client's samples is not a sum over samples

    @property
    def metric(self) -> Metric:
        return self.metrics[0]

    @property
    def reported(self) -> tuple[Metric, ...]:
        """All metrics that are numbers: the task's own, then the added ones."""
        return (*self.metrics, *(m for m in self.added if m.is_number))

    @property
    def prediction_metrics(self) -> tuple[PredictionMetric, ...]:
        """The added metrics that are computed from predictions instead of counts."""
        return tuple(m for m in self.added if isinstance(m, PredictionMetric))

    @property
    def classes(self) -> int:
        """Number of classes; 0 if targets are not classes."""
        return 0

    # ---- loss --------------------------------------------------------------------------------------------------------
    @abstractmethod
    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the losses of the samples [batch]."""

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean loss of the batch; weight [batch] is 0 for padding."""
        each = self.each(outputs, y)
        return each.mean() if weight is None else (each * weight).sum() / weight.sum().clamp(min=1)

    def total(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the losses over the samples."""
        return self.each(outputs, y).sum()

    # ---- scores ------------------------------------------------------------------------------------------------------
    def predictions(self, outputs: Tensor) -> Tensor:
        """Return what functions of the user see: probabilities [n, outputs] in float64, numbers, or log risks."""
        return outputs

    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """Return names, shapes and types of the counts of a score."""

    @abstractmethod
    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        """Return the counts of all samples of a client."""

    def count_all(self, parts: Sequence[tuple[Tensor, Tensor]]) -> list[Counts]:
        """Return the counts of several clients, each with its outputs and targets."""
        return [self.count(outputs, y) for outputs, y in parts]

    @abstractmethod
    def samples(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the numbers of samples in counts [clients, ...]."""

    @abstractmethod
    def measured(self, counts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return all metrics [clients] by name, from counts [clients, ...]; NaN where a metric is undefined."""

    def wrong(self, counts: Counts) -> str:
        """Return why these counts contradict each other, or an empty string."""
        return ""

    def check(self, counts: Counts) -> None:
        """Raise CoterieError if counts from another host are impossible."""
        shapes = self.shapes()
        if counts.keys() != shapes.keys():
            raise CoterieError(f"a score of {self.name} must hold {', '.join(shapes)}")
        for name, (shape, dtype) in shapes.items():
            v = counts[name]
            if v.dtype != dtype or v.shape != shape:
                raise CoterieError(f"a score must hold {name} of shape {list(shape)}")
        for name, v in counts.items():
            if not v.is_floating_point() and not bool(((v >= 0) & (v <= MOST_SAMPLES)).all()):
                raise CoterieError(f"a score cannot count fewer than 0 or more than {MOST_SAMPLES} samples")
            if v.is_floating_point() and bool((v < 0).any()):
                raise CoterieError(f"a score has an impossible {name}")
        if why := self.wrong(counts):
            raise CoterieError(why)

    # ---- partitions --------------------------------------------------------------------------------------------------
    @abstractmethod
    def strata(self, y: Tensor) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return a class or a range of targets for each sample [n], used for partitions and splits, and their names."""

    @property
    def can_deal(self) -> bool:
        """True if samples can be partitioned by strata (dirichlet, shards, ...)."""
        return True


# ---- classes ---------------------------------------------------------------------------------------------------------
class Classification(Task):
    """One of several classes: a whole number."""

    name = "classification"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy", percent=True),)

    @property
    def classes(self) -> int:
        return self.outputs

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="none")

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.cross_entropy(outputs, y) if weight is None else super().loss(outputs, y, weight)

    def total(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="sum")

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.double().softmax(1)

    def shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = dict.fromkeys(("hits", "total"), ((self.classes,), torch.int64))
        for metric in self.added:
            shapes |= metric.shapes(self.classes)
        return shapes

    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        hits = torch.bincount(y[outputs.argmax(1) == y], minlength=self.classes)
        counts = {"hits": hits, "total": torch.bincount(y, minlength=self.classes)}
        for metric in self.added:
            counts |= metric.count(outputs, y)
        return counts

    def count_all(self, parts: Sequence[tuple[Tensor, Tensor]]) -> list[Counts]:
        """Return the counts of several clients, in few operations for many clients with few samples each."""
        if self.added:
            return super().count_all(parts)
        y = torch.cat([y for _, y in parts])
        right = torch.cat([outputs for outputs, _ in parts]).argmax(1) == y if len(y) else y > 0
        who = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(y) for _, y in parts])).to(y.device)
        at, cells = who * self.classes + y, len(parts) * self.classes
        total = torch.bincount(at, minlength=cells).view(-1, self.classes)
        hits = torch.bincount(at[right], minlength=cells).view(-1, self.classes)
        return [{"hits": h, "total": t} for h, t in zip(hits, total, strict=True)]

    def samples(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        totals: np.ndarray = counts["total"].sum(1)
        return totals

    def measured(self, counts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        counted = [m for m in self.added if m.is_number and not m.needs_predictions]
        accuracy = share(counts["hits"].sum(1), counts["total"].sum(1))
        return {"accuracy": accuracy, **{m.name: m.value(counts) for m in counted}}

    def wrong(self, counts: Counts) -> str:
        if not bool((counts["hits"] <= counts["total"]).all()):
            return "a score cannot have more hits than samples"
        return next((why for m in self.added if (why := m.wrong(counts))), "")

    def strata(self, y: Tensor) -> tuple[np.ndarray, tuple[str, ...]]:
        return y.numpy(), tuple(map(str, range(self.classes)))


class Binary(Classification):
    """One of two classes, judged by the area under the ROC curve of the second class."""

    name = "binary"
    metrics = (Metric("AUC"), Metric("accuracy", percent=True))

    def shapes(self) -> dict[str, Shape]:
        return super().shapes() | dict.fromkeys(("pairs", "ordered"), ((), torch.float64))

    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        score = (outputs[:, 1] - outputs[:, 0]).double() if len(y) else outputs.new_zeros(0).double()
        pairs = ((y == 1).sum() * (y == 0).sum()).double()
        return super().count(outputs, y) | {"pairs": pairs, "ordered": ordered(score[y == 1], score[y == 0])}

    def count_all(self, parts: Sequence[tuple[Tensor, Tensor]]) -> list[Counts]:
        return [self.count(outputs, y) for outputs, y in parts]

    def measured(self, counts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"AUC": share(counts["ordered"], counts["pairs"]), **super().measured(counts)}

    def wrong(self, counts: Counts) -> str:
        return super().wrong(counts) or _more(counts, "ordered", "pairs")


# ---- numbers ---------------------------------------------------------------------------------------------------------
class Regression(Task):
    """One number or several: mean squared error. R2 compares with the mean of the client's own targets."""

    name = "regression"
    metrics = (Metric("RMSE", lower=True), Metric("MAE", lower=True), Metric("R2"))

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).square().mean(-1)

    def shapes(self) -> dict[str, Shape]:
        sums = dict.fromkeys(("squared", "absolute", "spread"), ((self.outputs,), torch.float64))
        return {"samples": ((), torch.int64), **sums}

    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        y = y.double()
        error = self.predictions(outputs).double() - y
        spread = (y - y.mean(0)).square().sum(0) if len(y) else y.new_zeros(self.outputs)
        return {
            "samples": torch.tensor(len(y)),
            "squared": error.square().sum(0),
            "absolute": error.abs().sum(0),
            "spread": spread,
        }

    def samples(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        return counts["samples"]

    def measured(self, counts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        numbers = counts["samples"] * self.outputs
        squared = counts["squared"].sum(1)
        return {
            "RMSE": np.sqrt(share(squared, numbers)),
            "MAE": share(counts["absolute"].sum(1), numbers),
            "R2": 1 - share(squared, counts["spread"].sum(1)),
        }

    def strata(self, y: Tensor) -> tuple[np.ndarray, tuple[str, ...]]:
        return ranges(y[:, 0].numpy())


class EventCount(Regression):
    """Numbers of events: a Poisson model whose outputs are the logarithm of the expected number."""

    name = "count"

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return half the Poisson deviance of each sample, which is never negative."""
        return (outputs.exp() - y * outputs + torch.xlogy(y, y) - y).mean(-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.exp()


class MultiLabel(Task):
    """Any number of labels at once: 0 or 1 for each. A label is given where its output is above 0."""

    name = "multilabel"
    metrics = (Metric("macro F1"), Metric("mAP"))

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.double().sigmoid()

    def shapes(self) -> dict[str, Shape]:
        whole = dict.fromkeys(("hits", "guessed", "positives"), ((self.outputs,), torch.int64))
        return {"samples": ((), torch.int64), **whole, "precision": ((self.outputs,), torch.float64)}

    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        true, guess = y > 0.5, outputs > 0
        precisions = [average_precision(outputs[:, k], true[:, k]) for k in range(self.outputs)]
        return {
            "samples": torch.tensor(len(y)),
            "hits": (true & guess).sum(0),
            "guessed": guess.sum(0),
            "positives": true.sum(0),
            "precision": torch.stack(precisions),
        }

    def samples(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        return counts["samples"]

    def measured(self, counts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return means over the labels that occur (F1: or are predicted)."""
        f1 = share(2 * counts["hits"], counts["guessed"] + counts["positives"])
        return {"macro F1": known_mean(f1), "mAP": known_mean(share(counts["precision"], counts["positives"]))}

    def wrong(self, counts: Counts) -> str:
        for name in ("guessed", "positives"):
            if bool((counts["hits"] > counts[name]).any()) or bool((counts[name] > counts["samples"]).any()):
                return "a score cannot have more hits than samples"
        return _more(counts, "precision", "positives")

    def strata(self, y: Tensor) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return whether a sample has any label, which only balances splits."""
        return (y.sum(1) > 0).long().numpy(), ("none", "some")

    @property
    def can_deal(self) -> bool:
        return False


class Survival(Task):
    """Time and event: 1 if the event happened at that time, 0 if it had not been observed until then.

    The output is a log risk. The loss is Cox's partial likelihood among the samples of a batch, or of a client when it
    is scored; the metric is Harrell's C-index over the client's pairs.
    """

    name = "survival"
    metrics = (Metric("C-index"),)
    whole = True

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the losses of the events, 0 for others; a risk set holds the samples of the batch not earlier."""
        return self._each(outputs[:, 0], y, y.new_ones(len(y)))

    def _each(self, risk: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        time, event = y[:, 0], y[:, 1]
        at_risk = (time[None, :] >= time[:, None]) & (weight[None, :] > 0)
        at_risk = at_risk | torch.eye(len(y), dtype=torch.bool, device=y.device)
        sums = torch.where(at_risk, risk[None, :], risk.new_tensor(-1e30)).logsumexp(1)
        return event * (sums - risk)

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = y.new_ones(len(y)) if weight is None else weight
        each = self._each(outputs[:, 0], y, weight) * weight
        return each.sum() / (weight * y[:, 1]).sum().clamp(min=1)

    def total(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum of `each`, computed without a table of pairs."""
        risk, time = outputs[:, 0].double(), y[:, 0]
        order = time.argsort(descending=True)
        sums = risk[order].logcumsumexp(0)
        later = len(y) - torch.searchsorted(time.sort().values, time.contiguous())  # number of samples not earlier
        return (y[:, 1] * (sums[later - 1] - risk)).sum() if len(y) else risk.sum()

    def shapes(self) -> dict[str, Shape]:
        sums = dict.fromkeys(("pairs", "ordered"), ((), torch.float64))
        return {"samples": ((), torch.int64), "events": ((), torch.int64), **sums}

    def count(self, outputs: Tensor, y: Tensor) -> Counts:
        pairs, good = torch.zeros((2,), dtype=torch.float64, device=y.device)
        happened = (y[:, 1] > 0.5).nonzero()[:, 0]
        risk = outputs[:, 0].double()
        for part in torch.split(happened, PAIRS):
            later = y[None, :, 0] > y[part, 0][:, None]
            pairs = pairs + later.sum()
            good = good + later.double().mul(_above(risk[part][:, None], risk[None, :])).sum()
        return {"samples": torch.tensor(len(y)), "events": torch.tensor(len(happened)), "pairs": pairs, "ordered": good}

    def samples(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        return counts["samples"]

    def measured(self, counts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"C-index": share(counts["ordered"], counts["pairs"])}

    def wrong(self, counts: Counts) -> str:
        if bool(counts["events"] > counts["samples"]):
            return "a score cannot have more events than samples"
        return _more(counts, "ordered", "pairs")

    def strata(self, y: Tensor) -> tuple[np.ndarray, tuple[str, ...]]:
        return (y[:, 1] > 0.5).long().numpy(), ("censored", "event")

    @property
    def can_deal(self) -> bool:
        return False


TASKS: dict[str, type[Task]] = {
    t.name: t for t in (Classification, Binary, Regression, EventCount, MultiLabel, Survival)
}


def make(name: str, outputs: int, metrics: str | None = None) -> Task:
    """Return a task, with the metrics that the setting `metrics` names."""
    return with_metrics(TASKS[task_name(name)](outputs), metrics)


def with_metrics(task: Task, metrics: str | None, functions: Mapping[str, MetricFunction] | None = None) -> Task:
    """Return the task with added metrics; raise CoterieError if it does not have what one of them needs."""
    added = added_metrics(metrics, functions)
    for metric in added:
        if not task.classes and metric in NAMED_METRICS.values():
            raise CoterieError(f"{metric.name} is a metric of classification, and the task is {task.name}")
        if metric.name in {m.name for m in task.metrics}:
            raise CoterieError(f"{metric.name} is a metric of the task {task.name} already; leave it out of metrics")
    return replace(task, added=tuple(added))


def task_name(name: str) -> str:
    """Return the name if there is such a task; raise CoterieError otherwise."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return name


# ---- arithmetic ------------------------------------------------------------------------------------------------------
def ordered(high: Tensor, low: Tensor) -> Tensor:
    """Return the number of pairs whose first value is above the second; equal values count half."""
    parts = [_above(part[:, None], low[None, :]).sum() for part in torch.split(high, PAIRS)]
    return torch.stack(parts).sum() if len(high) else high.new_zeros((), dtype=torch.float64)


def _above(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 where a > b, 1/2 where both are equal, and NaN where one of them is NaN."""
    return ((a - b).sign() + 1) / 2 if bool(a.isfinite().all() and b.isfinite().all()) else (a - b) * torch.nan


def average_precision(score: Tensor, true: Tensor) -> Tensor:
    """Return the sum over positives of the precision at their scores, in float64."""
    order = score.argsort(descending=True)
    s, t = score[order], true[order].double()
    last = len(s) - 1 - torch.searchsorted(s.flip(0), s.contiguous())  # last position with the same score
    precision = t.cumsum(0) / torch.arange(1, len(s) + 1, device=s.device)
    return (precision[last.clamp(0)] * t).sum()


def ranges(values: np.ndarray, most: int = 10) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the quantile range of each value, and the ranges' names; equal values are in the same range."""
    edges = np.unique(np.quantile(values, np.arange(1, most) / most, method="inverted_cdf"))
    edges = edges[edges < values.max()] if len(values) else edges
    names = [f"up to {e:.4g}" for e in edges] + [f"above {edges[-1]:.4g}" if len(edges) else "all"]
    return np.searchsorted(edges, values, side="left").astype(np.int64), tuple(names)


def _more(counts: Counts, part: str, whole: str) -> str:
    """True if a sum of halves and wholes exceeds the number that it is a part of."""
    over = counts[part] > counts[whole] * (1 + 1e-9)
    return f"a score cannot have more {part} than {whole}" if bool(over.any()) else ""
