"""The statistics of one run, from its rounds to the numbers of a table.

Accuracies are shares, not percent. The metric of the task decides whether higher or lower is better.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from coterie.core.metrics import Metric
from coterie.core.tasks import Classification
from coterie.core.views import VIEWS


def summarise(rounds: pd.DataFrame, planned: int, metrics: Sequence[Metric] = Classification.metrics) -> dict[str, Any]:
    """Return for each view: last, mean of the last ten rounds, best, and value at the round selected on val data."""
    out: dict[str, Any] = {"rounds": int(rounds.index.max()) if len(rounds) else 0, "planned": planned}
    out |= {"metric": metrics[0].name, "lower_is_better": metrics[0].lower}
    if not len(rounds):
        return out
    final = rounds.index.max()
    for mark in ("", "newcomers/"):
        for view in VIEWS:
            name = f"{mark}{view}/test"
            if f"{name}/mean" in rounds and rounds[f"{name}/mean"].notna().any():
                out[f"{mark}{view}"] = _view(rounds, name, f"{mark}{view}/val/mean", final, metrics)
    if "personal/attack/mean" in rounds:  # the success of an attack that wants certain classes
        out["attack"] = _view(rounds, "personal/attack", "", final, metrics[:1])
    for when in ("before", "after"):
        if (column := f"participants/{when}/pooled") in rounds:
            out[f"participants_{when}_last10"] = float(rounds[column][rounds.index > final - 10].mean())
    bytes_ = rounds.filter(like="bytes/").fillna(0)
    out["bytes"] = {c.removeprefix("bytes/"): int(bytes_[c].sum()) for c in bytes_}
    trained = rounds[rounds.index > 0]
    out["bytes_per_round"] = {c.removeprefix("bytes/"): float(bytes_.loc[trained.index, c].mean()) for c in bytes_}
    if "seconds" in rounds:
        out["seconds_per_round"] = float(trained["seconds"].median())
        out["seconds"] = float(rounds["seconds"].sum())
    out["nonfinite"], out["failed"] = int(rounds["nonfinite"].sum()), int(rounds["failed"].sum())
    return out


def _view(rounds: pd.DataFrame, name: str, chosen_by: str, final: int, metrics: Sequence[Metric]) -> dict[str, Any]:
    seen = rounds[f"{name}/mean"].dropna()
    last = int(seen.index.max())
    clients = rounds[f"{name}/clients"]
    broken = rounds[f"{name}/nonfinite"].fillna(0) if f"{name}/nonfinite" in rounds else clients * 0
    sound = seen[(broken < clients)[seen.index]]  # rounds in which at least one model did not diverge
    stats: dict[str, Any] = {
        "last": float(seen[last]),
        "round": last,
        "last10": float(seen[seen.index > final - 10].mean()),
        "best": float(sound[_best(sound, metrics[0])]) if len(sound) else np.nan,
        "best_round": _best(sound, metrics[0]) if len(sound) else last,
        "clients": int(clients[last]),
        "nonfinite": int(broken[last]),  # clients whose models give NaN or infinity
    }
    stats |= {k: float(rounds[f"{name}/{k}"][last]) for k in ("std", "worst10", "pooled", "loss")}
    if f"{name}/clusters" in rounds and not pd.isna(rounds[f"{name}/clusters"][last]):
        stats["clusters"] = float(rounds[f"{name}/clusters"][last])
    for metric in metrics[1:]:
        for statistic in (metric.name, f"pooled {metric.name}"):
            if f"{name}/{statistic}" in rounds:
                stats[statistic] = float(rounds[f"{name}/{statistic}"][last])
        if not pd.isna(rounds.get(f"{name}/undefined {metric.name}", {}).get(last, np.nan)):
            stats[f"undefined {metric.name}"] = int(rounds[f"{name}/undefined {metric.name}"][last])
    if f"{name}/undefined" in rounds and rounds[f"{name}/undefined"].notna()[last]:
        stats["undefined"] = int(rounds[f"{name}/undefined"][last])  # clients without a defined metric
    if chosen_by in rounds and rounds[chosen_by][sound.index].notna().any():
        pick = _best(rounds[chosen_by][sound.index].dropna(), metrics[0])
        stats |= {"selected": float(seen[pick]), "selected_round": pick}
    return stats


def _best(values: pd.Series, metric: Metric) -> int:
    """Return the round with the best value."""
    return int(values.idxmin() if metric.lower else values.idxmax())


def cumulative_bytes(rounds: pd.DataFrame) -> pd.Series:
    """Return the bytes sent over all links and directions up to each round."""
    return rounds.filter(like="bytes/").fillna(0).sum(axis=1).cumsum()


def gain_counts(differences: Any) -> tuple[int, int]:
    """Return the number of clients that gain and the number that lose."""
    return int((differences > 0).sum()), int((differences < 0).sum())


def rounds_to(curve: pd.Series, target: float, lower: bool = False) -> int | None:
    """Return the first round whose value reaches the target, or with `lower` falls to it; None if none does."""
    reached = curve[curve <= target] if lower else curve[curve >= target]
    return int(reached.index[0]) if len(reached) else None
