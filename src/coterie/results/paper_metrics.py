"""The statistics of the papers, as pure functions of hits and totals per class; accuracies are shares, not percent.

Do not mix them in one table: they differ in model, data and round.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from coterie.errors import CoterieError
from coterie.results.bootstrap import FloatArray, IntArray
from coterie.results.run import Run, names_by_client


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


def official(run: Run, round: int | None = None, view: str = "personal") -> dict[str, float]:
    """Return GM, PM(V) and PM(L) of one evaluation (default: the last) of a run with official = true.

    The view `trained` scores the personal models after one more local training: in the last round, and in all
    evaluations of a run with headline = trained.
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


def official_curves(run: Run) -> pd.DataFrame:
    """Return GM, PM(V) and PM(L) of every evaluation, by round.

    The models are the trained ones if every evaluation scored these, otherwise the personal ones.
    """
    rounds = [int(e["round"]) for e in run.events if "evaluation" in e]
    view = "trained" if all("trained/official/hits" in run.evaluation(t) for t in rounds) else "personal"
    return pd.DataFrame({t: official(run, t, view) for t in rounds}).T.rename_axis("round")


def best_layers(runs: Mapping[str, Run]) -> list[str]:
    """Return the layer with which each client is most accurate, from runs of X-full by layer (FedCPMD, section 4).

    Validation data decide. A tie, or a client without such data, goes to the last of the layers.
    """
    scores = {}
    for layer, run in runs.items():
        each = run.clients()
        if "personal/val" not in each:
            raise CoterieError(f"{run.path} has no validation part to choose layers by; run it with val_share above 0")
        scores[layer] = each.loc[~each["newcomer"], "personal/val"].fillna(0)
    order = list(reversed(scores))
    best: list[str] = pd.DataFrame(scores)[order].idxmax(axis=1).tolist()
    return best


def clients_with_layer(run: Run, layer: str) -> float:
    """Return the number of clients that keep a layer at the end; NaN if the method lets clients keep none."""
    kept = [e["facts"]["layer"] for e in run.events if "layer" in e.get("facts", {})]
    return float(sum(name == layer for name in kept[-1].values())) if kept else float("nan")


def clustering_round(run: Run) -> float:
    """Return the first round that ended with two or more clusters; NaN if no round did."""
    for event in run.events:
        if len(set(names_by_client(event.get("facts", {}).get("clusters")).values())) > 1:
            return float(event["round"])
    return float("nan")


def aun_rise(run: Run) -> float:
    """Return AUN of the round after the clusters were made, divided by AUN of the round before; NaN without clusters.

    A run needs log_updates. In the paper AUN rises when clusters are made, so that the ratio is above one.
    """
    if "note/aun" not in run.rounds:
        raise CoterieError(f"{run.path} did not log its updates; run it with --set log_updates=true")
    aun, made = run.rounds["note/aun"].dropna(), clustering_round(run)
    around = [made - 1, made + 1]
    return float(aun[around[1]] / aun[around[0]]) if all(r in aun.index for r in around) else float("nan")
