"""The statistics of the papers, as pure functions of hits and totals per class; accuracies are shares, not percent.

Do not mix them in one table: they differ in model, data and round.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from sklearn.metrics import adjusted_rand_score

from coterie.errors import CoterieError
from coterie.results.bootstrap import FloatArray, IntArray
from coterie.results.run import Run
from coterie.results.statistics import rounds_to as rounds_to_target


def weighted_accuracy(hits: IntArray, total: IntArray, weights: IntArray | FloatArray) -> FloatArray:
    """Return sum_k u_k hits_k / sum_k u_k total_k over the last axis [..., classes]; NaN where the divisor is 0."""
    count = (weights * total).sum(-1)
    return np.where(count > 0, (weights * hits).sum(-1) / np.where(count > 0, count, 1), np.nan)


def gm(hits: IntArray, total: IntArray) -> float:
    """Return GM: accuracy of one model [classes] on the official test part, with equal weights."""
    return float(weighted_accuracy(hits, total, np.ones(len(hits))))


def pm_v(hits: IntArray, total: IntArray, train: IntArray) -> float:
    """Return PM(V): mean accuracy of personal models on the classes of their training data; all [clients, classes]."""
    return float(np.nanmean(weighted_accuracy(hits, total, (train > 0).astype(np.int64))))


def pm_l(hits: IntArray, total: IntArray, train: IntArray) -> float:
    """Return PM(L): as PM(V), with classes weighted by their share in the client's training data."""
    share = train / np.maximum(train.sum(-1, keepdims=True), 1)
    return float(np.nanmean(weighted_accuracy(hits, total, share)))


def clients_mean(hits: IntArray, total: IntArray) -> float:
    """Return the unweighted mean of the clients' accuracies on their own test parts; Ac of SC-FPFL."""
    return float(np.nanmean(weighted_accuracy(hits, total, np.ones(hits.shape[-1]))))


ac = clients_mean


def clients_mean_best(curve: pd.Series) -> tuple[float, int]:
    """Return the best mean accuracy over clients and its round (FedGMH); optimistic, since chosen on test data."""
    return float(curve.max()), int(curve.idxmax())


def global_final(curve: pd.Series) -> float:
    """Return the accuracy of the global model on the official test part after the last round (ECS-FL)."""
    return float(curve.iloc[-1])


def global_best(curve: pd.Series) -> tuple[float, int]:
    """Return the best accuracy of the global model and its round; optimistic, since chosen on test data."""
    return clients_mean_best(curve)


def class_recall(hits: IntArray, total: IntArray) -> FloatArray:
    """Return the recall of each class [classes], pooled over clients [clients, classes]; NaN for an absent class."""
    pooled_hits, pooled = (a.reshape(-1, a.shape[-1]).sum(0) for a in (hits, total))
    return np.where(pooled > 0, pooled_hits / np.maximum(pooled, 1), np.nan)


def adjusted_rand(groups: Sequence[int] | IntArray, true: Sequence[int] | IntArray) -> float:
    """Return the agreement of two groupings: 1 if they are the same up to names, about 0 by chance."""
    return float(adjusted_rand_score(np.asarray(true), np.asarray(groups)))


def official(run: Run, round: int | None = None, view: str = "personal") -> dict[str, float]:
    """Return GM, PM(V) and PM(L) of one evaluation (default: the last) of a run with official = true.

    The view `trained` scores the personal models after one more local training (last round only).
    """
    z = run.evaluation(round)
    if f"{view}/official/hits" not in z:
        more = " and final_trained = true" if view == "trained" else ""
        raise CoterieError(f"{run.path} was not scored on the official test part; run it with official = true{more}")
    rows = ~z["newcomer"]
    train = run.session().federation.label_counts("train")[z["clients"][rows]]
    hits, total = z[f"{view}/official/hits"][rows], z[f"{view}/official/total"][rows]
    out = {"PM(V)": pm_v(hits, total, train), "PM(L)": pm_l(hits, total, train)}
    if "global/official/hits" in z:
        out["GM"] = gm(z["global/official/hits"][0], z["global/official/total"][0])
    return out


__all__ = [
    "ac",
    "adjusted_rand",
    "class_recall",
    "clients_mean",
    "clients_mean_best",
    "global_best",
    "global_final",
    "gm",
    "official",
    "pm_l",
    "pm_v",
    "rounds_to_target",
    "weighted_accuracy",
]
