"""The evaluation protocol: one set of views, parts and statistics for every method.

Views: personal (the model that a client would use now), global, adapted (after fine-tuning). After the last round, or
if one of them is the headline: received (the model assembled from the download, before local training), trained (after
it), edge (the model of the client's cluster or edge, or else the global model). Parts: test, val.
Statistics over clients: mean, std, worst decile; pooled over samples; mean over clusters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np
import torch

from coterie.core.context import ClientId
from coterie.core.method import Method
from coterie.core.tasks import Task
from coterie.core.tree import Tree
from coterie.data.federation import Federation
from coterie.engine.messages import Score, ScoreAnswer, TrainAnswer
from coterie.train.clients import Clients
from coterie.train.scoring import score_model

ALONE = -1  # stands for the cluster of a client without a cluster


def statistics(
    task: Task,
    counts: Mapping[str, np.ndarray],
    loss: np.ndarray,
    cluster: np.ndarray | None = None,
    predicted: Mapping[str, tuple[np.ndarray, float]] | None = None,
) -> dict[str, float]:
    """Return statistics over the clients with at least one sample; counts [clients, ...], loss [clients] summed.

    mean, std and worst10 are of the task's first metric over the clients for which it is defined; pooled is the metric
    of all their counts together. Other metrics follow by name, and as `pooled NAME`. If there are any, `undefined`
    counts the clients without a value (`undefined NAME` for an added metric), and `nonfinite` those whose models give
    NaN or infinity. `clusters` is the mean over clusters of the mean over their clients; all clusters have equal
    weight. `predicted` holds metrics computed from predictions by name: values [clients], and the pooled value.
    """
    n = task.samples(counts)
    seen = n > 0
    if not seen.any():
        return {}
    present = {k: v[seen] for k, v in counts.items()}
    each, pooled = task.measured(present), task.measured({k: v.sum(0, keepdims=True) for k, v in present.items()})
    for other, (values, together) in (predicted or {}).items():
        each[other], pooled[other] = values[seen], np.array([together])
    name, *others = (m.name for m in task.reported if m.name in each)
    broken, values = ~np.isfinite(loss[seen]), each[name]
    absent = np.isnan(values) & ~broken
    values = values[~absent]
    out = {
        "mean": float(values.mean()) if len(values) else np.nan,
        "std": float(values.std()) if len(values) else np.nan,
        "worst10": float(task.metric.worst(values).mean()) if len(values) else np.nan,
        "pooled": float(pooled[name][0]),
        "loss": float(loss.sum() / n.sum()),
        "clients": int(seen.sum()),
        **_over_clusters(values, None if cluster is None else cluster[seen][~absent]),
    }
    added = {m.name for m in task.added}
    for other in others:
        known = each[other][~np.isnan(each[other])]
        out[other] = float(known.mean()) if len(known) else np.nan
        out[f"pooled {other}"] = float(pooled[other][0])
        if other in added and len(known) < len(each[other]):
            out[f"undefined {other}"] = len(each[other]) - len(known)
    out |= {"undefined": int(absent.sum())} if absent.any() else {}
    return out | ({"nonfinite": int(broken.sum())} if broken.any() else {})


def _over_clusters(values: np.ndarray, cluster: np.ndarray | None) -> dict[str, float]:
    if cluster is None or not (cluster != ALONE).any():
        return {}
    means = [values[cluster == c].mean() for c in np.unique(cluster[cluster != ALONE])]
    return {"clusters": float(np.mean(means)), "cluster_count": len(means)}


@dataclass(frozen=True)
class Evaluation:
    """Counts and losses of all clients, by "view/part"."""

    task: Task
    clients: list[ClientId]
    newcomer: np.ndarray  # [clients] bool
    counts: dict[str, dict[str, np.ndarray]]  # [clients, ...]
    loss: dict[str, np.ndarray]  # [clients]
    cluster: np.ndarray | None = None  # [clients], ALONE for clients without one; None if the method makes no clusters
    adapting: Mapping[str, int] = field(
        default_factory=dict
    )  # steps and samples of fine-tuning all clients but newcomers
    samples: Mapping[str, Mapping[int, tuple[np.ndarray, np.ndarray]]] = field(
        default_factory=dict
    )  # predictions and targets by row, if a metric needs them

    @staticmethod
    def of(
        task: Task,
        answers: Sequence[ScoreAnswer],
        newcomers: set[ClientId],
        cluster_of: Mapping[ClientId, int] | None = None,
    ) -> "Evaluation":
        keys = sorted({k for a in answers for k in a.scores})
        n, shapes = len(answers), task.shapes()
        counts = {k: {c: torch.zeros(n, *s, dtype=d).numpy() for c, (s, d) in shapes.items()} for k in keys}
        loss = {k: np.zeros(n) for k in keys}
        samples: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {k: {} for k in keys}
        for i, a in enumerate(answers):
            for k, s in a.scores.items():
                loss[k][i] = s.loss
                for c, v in s.counts.items():
                    counts[k][c][i] = v.numpy()
                if s.samples:
                    samples[k][i] = s.samples[0].numpy(), s.samples[1].numpy()
        clients = [a.client for a in answers]
        cluster = None if cluster_of is None else np.array([int(cluster_of.get(c, ALONE)) for c in clients])
        own = [a for a in answers if a.client not in newcomers]
        work = {"steps": sum(a.steps for a in own), "samples": sum(a.seen for a in own)}
        new = np.array([c in newcomers for c in clients])
        return Evaluation(task, clients, new, counts, loss, cluster, work if work["steps"] else {}, samples)

    @cached_property
    def _values(self) -> dict[str, dict[str, np.ndarray]]:
        """Metrics computed from predictions, by "view/part" and name [clients]; NaN where one is undefined."""
        out: dict[str, dict[str, np.ndarray]] = {k: {} for k in self.counts}
        for k, metric in product(self.counts, self.task.prediction_metrics):
            out[k][metric.name] = values = np.full(len(self.clients), np.nan)
            for i, part in self.samples[k].items():
                values[i] = metric.of(*part)
        return out

    def _predicted(self, k: str, rows: np.ndarray) -> dict[str, tuple[np.ndarray, float]]:
        """Return values of these rows and the pooled value of each metric that is computed from predictions."""
        parts = [part for i, part in self.samples.get(k, {}).items() if rows[i]]
        if not parts:
            return {}
        joined = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        return {m.name: (self._values[k][m.name][rows], m.of(*joined)) for m in self.task.prediction_metrics}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the evaluation file; counts are small, so they are stored in full."""
        out = {"clients": np.array(self.clients), "newcomer": self.newcomer}
        if self.cluster is not None:
            out["cluster"] = self.cluster
        for k, found in self.counts.items():
            out |= {f"{k}/{c}": v for c, v in found.items()} | {f"{k}/loss": self.loss[k]}
            out |= {f"{k}/metric {name}": v for name, v in self._values[k].items()}
        return out

    def summary(self) -> dict[str, dict[str, float]]:
        """Return the statistics by "view/part"; newcomers are separate."""
        return self._summary

    @cached_property
    def _summary(self) -> dict[str, dict[str, float]]:
        out = {}
        for mark, rows in (("", ~self.newcomer), ("newcomers/", self.newcomer)):
            cluster = None if self.cluster is None else self.cluster[rows]
            for k, found in self.counts.items():
                mine = {c: v[rows] for c, v in found.items()}
                if stats := statistics(self.task, mine, self.loss[k][rows], cluster, self._predicted(k, rows)):
                    out[mark + k] = stats
        return out

    def headline(self, view: str = "personal") -> float | None:
        """Return the value of this view, or of the personal models if it was not scored; None without any sample."""
        name = f"{view}/test" if f"{view}/test" in self.counts else "personal/test"
        return self.summary().get(name, {}).get("mean")

    def nonfinite(self) -> int:
        """Clients whose personal models give NaN or infinity."""
        loss = self.loss.get("personal/test", np.zeros(0))
        return int((~np.isfinite(loss)).sum())


@dataclass(frozen=True)
class Watch:
    """Scores of one round's participants before and after their local training, on their test parts."""

    task: Task
    when: dict[str, dict[str, np.ndarray]]  # before, after -> counts [participants, ...]

    @staticmethod
    def of(task: Task, answers: Sequence[TrainAnswer]) -> "Watch":
        when = {}
        for name in ("before", "after"):
            rows = [s for a in answers if (s := getattr(a, name)) is not None]
            if rows:
                when[name] = {c: np.stack([s.counts[c].numpy() for s in rows]) for c in task.shapes()}
        return Watch(task, when)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return `pooled` over samples and `mean` over participants; for accuracy also each one's hits and samples."""
        return {name: self._stats(counts) for name, counts in self.when.items()}

    def _stats(self, counts: Mapping[str, np.ndarray]) -> dict[str, Any]:
        if self.task.metric.name == "accuracy":
            h, n = counts["hits"].sum(1), counts["total"].sum(1)
            pooled, mean = float(h.sum() / max(1, n.sum())), float((h / np.maximum(n, 1)).mean())
            return {"pooled": pooled, "mean": mean, "hits": h.tolist(), "total": n.tolist()}
        name = self.task.metric.name
        each = self.task.measured(counts)[name]
        pooled = self.task.measured({k: v.sum(0, keepdims=True) for k, v in counts.items()})[name][0]
        known = each[~np.isnan(each)]
        return {"pooled": float(pooled), "mean": float(known.mean()) if len(known) else np.nan}

    def headline(self) -> float | None:
        return float(self.summary()["before"]["mean"]) if "before" in self.when else None


class Official:
    """Scores on the official test part (setting `official`, for FedPC's tables): of personal models, and of one model.

    A method without a global model gets one for this purpose alone: the mean of the personal models by training
    samples, with the mean of their heads or the initial head (`gm_head`). It is never sent, so no bytes are counted. A
    method whose models have extras or missing entries gets none.
    """

    def __init__(
        self,
        method: Method,
        federation: Federation,
        head: Literal["mean", "init"] = "mean",
        clients: Clients | None = None,
    ):
        """Score on the device of these clients, if they are in this process; otherwise on the processor."""
        self.method, self.federation, self.head, self.clients = method, federation, head, clients

    def added(self, answers: Sequence[ScoreAnswer], whole: Tree | None, newcomers: set[ClientId]) -> list[ScoreAnswer]:
        """Return the answers with the score of the model for all; a global model is the personal one too."""
        model = whole if whole is not None else self._mean([a for a in answers if a.client not in newcomers])
        if model is None:
            return [replace(a, model=None) for a in answers]
        score = self._score(model)
        alike = {} if whole is None else {"personal/official": score}
        return [replace(a, model=None, scores={**alike, **a.scores, "global/official": score}) for a in answers]

    def _score(self, model: Tree) -> Score:
        split = self.federation.official()
        assert split is not None
        if self.clients is None:
            return score_model(self.method, model, {}, split, shared=True)
        place = self.clients.place
        with place.working():
            return score_model(self.clients.method, place.moved(model), {}, place.data(split), shared=True)

    def _mean(self, answers: Sequence[ScoreAnswer]) -> Tree | None:
        if not answers or any(a.model is None for a in answers):
            return None
        w0 = self.method.ctx.w0
        sums = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in w0.items()}
        for a in answers:
            for k, total in sums.items():
                assert a.model is not None
                total.add_(a.model[k], alpha=a.samples)
        samples = sum(a.samples for a in answers)
        model = {k: (v / samples).to(w0[k].dtype) for k, v in sums.items()}
        if self.head == "init":
            model |= {k: w0[k] for k in self.method.ctx.group("head")}
        return model


def notes(answers: Sequence[TrainAnswer]) -> dict[str, float]:
    """Return the numbers in the clients' notes, averaged over the clients that sent them.

    If clients sent their updates, `aun` is the norm of the mean update, SC-FPFL's equation (19).
    """
    out = {}
    for k in sorted({k for a in answers for k in a.note}):
        given = [a.note[k] for a in answers if k in a.note]
        out[k] = sum(given) / len(given)
    if updates := [a.update for a in answers if a.update is not None]:
        D = torch.stack(updates)  # [participants, P]
        each = D.norm(dim=1)
        out |= {"aun": float(D.mean(0).norm()), "mean_update": float(each.mean()), "largest_update": float(each.max())}
    return out
