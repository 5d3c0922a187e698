"""The numbers of a report, as plain values: the cells of its tables and the data that its script draws."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from coterie.core.metrics import Metric
from coterie.errors import CoterieError
from coterie.results.comparison import MODEL, Comparison
from coterie.results.controls import ControlTable, gain_sign, gain_unit, signed_text, value_text
from coterie.results.discovery import local_only_title
from coterie.results.report import membership
from coterie.results.run import IN_USE, Run
from coterie.results.statistics import cumulative_bytes, gain_counts
from coterie.storage.atomic import json_values

CURVE_TITLES = {
    f"{IN_USE}/test/mean": "model in use (personal or adapted), mean over clients",
    "personal/test/mean": "personal model, mean over clients",
    "personal/test/worst10": "personal model, worst tenth of the clients",
    "personal/test/pooled": "personal model, pooled over samples",
    "global/test/mean": "global model, mean over clients",
    "received/test/mean": "model as received, mean over clients",
    "trained/test/mean": "after local training, mean over clients",
    "edge/test/mean": "model of the cluster or edge, mean over clients",
    "global/official/pooled": "global model, official test part",
    "participants/before/pooled": "participants before local training (pooled)",
    "participants/after/pooled": "participants after local training (pooled)",
}
_MEANING = {  # the statistic behind each column
    IN_USE: "the model that a client would use, mean over clients, last evaluation",
    MODEL: "the model that a client would use",
    "personal": "personal models, mean over clients, last evaluation",
    "worst 10%": "as the first column, mean of the worst tenth of clients",
    "std": "as the first column, standard deviation over clients",
    "pooled": "as the first column, over all test samples together",
    "last 10": "as the first column, mean over the last 10 rounds",
    "selected": "as the first column, at the round chosen on validation data",
    "best": "as the first column, at the best test round (optimistic)",
    "global": "global model, mean over clients",
    "trained": "after local training, mean over clients",
    "adapted": "after fine-tuning, mean over clients",
    "received": "model as received, before local training, mean over clients",
    "edge": "model of the cluster or edge, otherwise the global model; mean over clients",
    "clusters": "as the first column, mean over clusters of their clients' mean",
    "newcomer": "clients that never trained, without training, mean over them",
    "newcomer adapted": "clients that never trained, after fine-tuning on their own data, last round",
    "diverged": "clients whose models give NaN or infinity",
    "MB up": "sent by clients, per round",
    "MB down": "sent to clients, per round",
    "s/round": "median time of a round",
}
_METRIC_COLUMNS = (
    IN_USE, "personal", "worst 10%", "pooled", "selected", "last 10", "best", "global", "trained", "adapted",
    "received", "edge", "clusters",
)  # fmt: skip
_MOST_NUMBERS = 200_000  # largest number of values in clients' curves on one page


def group_name(name: str, comparison: Comparison) -> str:
    """Return the name of a group of runs, or its data set and partition if it has no name."""
    first = comparison.runs[0]
    return name or f"{first.data}, {first.partition}"


# ---- tables ----------------------------------------------------------------------------------------------------------
def summary_table(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison's table as text, with the value behind each cell and marks on the best cells."""
    table, readable = comparison.table(), comparison.readable()
    seeds = {t: int(n) for t, n in table["seeds"].items()}
    rows = []
    for title in readable.index:
        cells = []
        for c in readable.columns:
            value = float(table.loc[title, c]) if c in table and c != MODEL else float("nan")
            if c == "diverged":
                value = float(table.loc[title, "diverged"])
            cells.append({"text": readable.loc[title, c], "value": None if np.isnan(value) else value})
        rows.append({"title": title, "cells": cells})
    marks = winners(comparison)
    for row in rows:
        for name, cell in zip(readable.columns, row["cells"], strict=True):
            first = marks.get(name, ())
            cell["best"], cell["tie"] = row["title"] in first, row["title"] in first and len(first) > 1
    return {
        "metric": comparison.metric.heading,
        "text": ", ".join(_sizes(comparison, set(seeds.values()))),
        "columns": [{"name": c, "meaning": _MEANING.get(c, "")} for c in readable.columns],
        "rows": rows,
        "spread": max(seeds.values(), default=1) > 1,
        "ties": any(len(v) > 1 for v in marks.values()),
    }


def _sizes(comparison: Comparison, seeds: set[int]) -> list[str]:
    """Return the number of clients, of samples (unknown where devices have data of their own) and of seeds."""
    partition = comparison.runs[0].description["partition"]
    words = [f"{partition['clients']} clients"]
    if "dealt" in partition:
        words.append(f"{partition['dealt']:,} samples")
    if len(seeds) == 1 and max(seeds) > 1:
        words.append(f"{max(seeds)} seeds")
    return words


def winners(comparison: Comparison) -> dict[str, list[str]]:
    """Return the methods with the best mean by column; several if the table shows the same number."""
    table, out = comparison.table(), {}
    if len(table) < 2:
        return {}
    for name in _METRIC_COLUMNS:
        if name in table and table[name].notna().any():
            shown = {str(t): comparison.metric.text(v) for t, v in table[name].astype(float).dropna().items()}
            values = table[name].astype(float)
            best = shown[str(values.idxmin() if comparison.metric.lower else values.idxmax())]
            out[name] = [t for t, text in shown.items() if text == best]
    return out


def client_gains(comparison: Comparison) -> dict[str, list[tuple[int, int, float]]]:
    """Return title -> (seed, client, gain over Local-Only), over all seeds that both methods have."""
    base = local_only_title(comparison.runs)
    if base is None:
        return {}
    alone = {r.settings["seed"]: f for r in comparison.runs if r.title == base and (f := _scored(r)) is not None}
    out: dict[str, list[tuple[int, int, float]]] = {}
    for r in comparison.runs:
        seed = r.settings["seed"]
        if r.title == base or seed not in alone or (mine := _scored(r)) is None:
            continue
        difference = gain_sign(comparison.metric) * comparison.metric.scale * (mine - alone[seed]).dropna()
        digits = _digits(comparison.metric) + 1
        out.setdefault(r.title, []).extend((seed, int(i), round(float(v), digits)) for i, v in difference.items())
    return out


def _scored(run: Run) -> Any:
    """Return the metric of the run's headline by client at the last evaluation; None if it cannot be read."""
    try:
        frame = run.clients()
    except CoterieError:  # not evaluated yet, or damaged, which a warning reports
        return None
    name = f"{run.headline}/test"
    return frame[name].dropna() if name in frame else None


def gain_table(comparison: Comparison) -> dict[str, Any] | None:
    """Return the number of clients that gain and lose against Local-Only, by method."""
    gains = client_gains(comparison)
    if not gains:
        return None
    rows = []
    for title, mine in gains.items():
        values = np.array([v for *_, v in mine])
        up, down = gain_counts(values)
        rows.append({
            "title": title, "up": up, "same": len(values) - up - down, "down": down, "mean": float(values.mean()),
            "median": float(np.median(values)), "least": float(values.min()), "most": float(values.max()),
        })  # fmt: skip
    metric = comparison.metric
    return {
        "base": local_only_title(comparison.runs), "rows": rows, "unit": gain_unit(metric), "digits": _digits(metric),
        "metric": metric.name,
    }  # fmt: skip


def control_rows(comparison: Comparison) -> dict[str, Any] | None:
    """Return paired differences to controls, the scope of their intervals and notes on them."""
    controls, metric = ControlTable(comparison.runs, view=comparison.view), comparison.metric
    if not controls.pairs:
        return None
    rows, forest = [], []
    for p in controls.pairs:
        d = p.difference
        cells = [
            (value_text(metric, p.against_mean, p.against_std), p.against_mean),
            (signed_text(metric, d.mean), d.mean),
            (f"{signed_text(metric, d.low)} to {signed_text(metric, d.high)}", d.low),
            *((n, n) for n in (d.gain, d.lose, d.tie)),
        ]
        rows.append({"method": p.row.title, "label": p.row.label, "against": p.against.label, "cells": cells})
        low, mean, high = (round(metric.scale * v, _digits(metric) + 1) for v in (d.low, d.mean, d.high))
        name, note = f"{p.row.label} against {p.against.label}", f"{d.gain} gain, {d.lose} lose"
        forest.append({"method": p.row.title, "name": name, "mean": mean, "low": low, "high": high, "note": note})
    axis = f"difference in {gain_unit(metric)}, 95 % interval"
    covers = f"{controls.covers().capitalize()}."
    return {
        "rows": rows,
        "metric": metric.name,
        "covers": covers,
        "notes": controls.warnings(),
        "axis": axis,
        "forest": json.dumps(json_values(forest)),
    }


def confusion_tables(comparison: Comparison) -> dict[str, list[list[int]]]:
    """Return method -> confusion matrix of its headline at the last evaluation, summed over clients and seeds."""
    out: dict[str, Any] = {}
    for r in comparison.runs:
        if any(not m.is_number for m in r.task.added):
            with suppress(CoterieError):  # not evaluated yet, or damaged, which a warning reports
                out[r.title] = out.get(r.title, 0) + r.confusion()
    return {title: matrix.tolist() for title, matrix in out.items()}


def byte_table(comparison: Comparison) -> list[list[Any]]:
    """Return method, link, megabytes per round and megabytes in total."""
    rows = []
    for title in comparison.titles:
        summary = next(r for r in comparison.runs if r.title == title).summary()
        for link, total in sorted(summary["bytes"].items()):
            rows.append([title, link.replace("/", ", "), summary["bytes_per_round"].get(link, 0.0) / 1e6, total / 1e6])
    return rows


# ---- data for the script ---------------------------------------------------------------------------------------------
def script_data(group: str, comparison: Comparison) -> dict[str, Any]:
    """Return the data that the page's script draws for one group of runs."""
    return {
        "name": group_name(group, comparison),
        "methods": comparison.titles,
        "metric": _metric_data(comparison.metric),
        "local": local_only_title(comparison.runs),
        "curves": curve_data(comparison),
        "gains": client_gains(comparison),
        "costs": cost_data(comparison),
        "clients": client_data(comparison),
        "clusters": cluster_data(comparison),
    }


def _metric_data(metric: Metric) -> dict[str, Any]:
    """Return how the script shows numbers of a metric; `sign` is -1 where lower is better."""
    return {
        "name": metric.name, "label": metric.label, "percent": metric.percent, "sign": gain_sign(metric),
        "digits": _digits(metric), "unit": gain_unit(metric),
    }  # fmt: skip


def _digits(metric: Metric) -> int:
    return 1 if metric.percent else 3


def curve_data(comparison: Comparison) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return curve -> method -> rounds, mean and spread over seeds, cumulative megabytes."""
    out: dict[str, dict[str, dict[str, list[float]]]] = {}
    scale = comparison.metric.scale
    views = [v for v in CURVE_TITLES if not v.startswith(IN_USE) or not comparison.view]
    for view in dict.fromkeys((f"{comparison.first}/test/mean", *views)):  # the headline first
        for title in comparison.titles:
            named = [(r.rounds, r.column(view)) for r in comparison.runs if r.title == title]
            frames = [f for f, name in named if name in f]
            if not frames:
                continue
            curves = [f[name].dropna() for f, name in named if name in f]
            rounds = sorted(set.intersection(*(set(c.index) for c in curves)))
            if not rounds:
                continue
            values = np.array([[float(c[t]) for t in rounds] for c in curves])
            spent = np.mean([cumulative_bytes(f)[rounds].values for f in frames], axis=0)
            out.setdefault(view, {})[title] = {
                "x": [int(t) for t in rounds],
                "y": [round(scale * v, 4) for v in values.mean(0)],
                "s": [round(scale * v, 4) for v in values.std(0, ddof=min(1, len(values) - 1))],
                "mb": [round(float(v) / 1e6, 4) for v in spent],
            }
    return out


def cost_data(comparison: Comparison) -> dict[str, dict[str, float]]:
    """Return method -> total megabytes sent and the last metric of the headline, means over seeds."""
    out = {}
    for title in comparison.titles:
        mine = [(r.headline, r.summary()) for r in comparison.runs if r.title == title]
        scored = [s for view, s in mine if view in s]
        last = [s[view]["last"] for view, s in mine if view in s]
        values = [comparison.metric.scale * v for v in last if np.isfinite(v)]
        if values:
            sizes = [sum(s["bytes"].values()) / 1e6 for s in scored]
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            out[title] = {"mb": float(np.mean(sizes)), "y": float(np.mean(values)), "s": spread}
    return out


def client_data(comparison: Comparison) -> dict[str, Any]:
    """Return seed -> samples, test labels (of classes), metric by method and its course over rounds, by client."""
    seeds = sorted({r.settings["seed"] for r in comparison.runs})
    most_rounds = _rounds_of_curves(comparison)
    out = {}
    for seed in seeds:
        mine = [r for r in comparison.runs if r.settings["seed"] == seed]
        clients = _clients_of_seed(list({r.title: r for r in reversed(mine)}.values())[::-1], most_rounds)
        if clients["ids"]:
            out[str(seed)] = clients
    return out


def _rounds_of_curves(comparison: Comparison) -> int:
    """Return the number of evaluated rounds for which a page has room in each client's curve."""
    curves = len(comparison.runs) * int(comparison.runs[0].description["partition"]["clients"])
    room = _MOST_NUMBERS // max(1, curves)
    return 0 if room < 3 else min(room, 40)


def _clients_of_seed(runs: Sequence[Run], most_rounds: int) -> dict[str, Any]:
    frames = {}
    for r in runs:
        try:
            frames[r.title] = r, r.evaluation()
        except CoterieError:  # not evaluated yet, or damaged, which a warning reports
            continue
    frames = {t: (r, z) for t, (r, z) in frames.items() if f"{r.headline}/test/loss" in z}
    ids = sorted({int(i) for _, z in frames.values() for i in z["clients"]})
    place = {i: k for k, i in enumerate(ids)}
    samples: list[int] = [0] * len(ids)
    labels: list[list[int]] = [[] for _ in ids]
    values: dict[str, list[float | None]] = {}
    course: dict[str, dict[str, Any]] = {}
    for title, (r, z) in frames.items():
        totals = z.get("personal/test/total", np.zeros((len(z["clients"]), 0), np.int64))
        for i, n, total in zip(z["clients"], r.task.samples(_counts(r, z)), totals, strict=True):
            samples[place[int(i)]], labels[place[int(i)]] = int(n), [int(k) for k in total]
        values[title] = _values(r, z, place)
        rounds = [e["round"] for e in r.events if "evaluation" in e]
        if most_rounds and len(rounds) > 1:
            picked = sorted({rounds[int(k)] for k in np.linspace(0, len(rounds) - 1, min(most_rounds, len(rounds)))})
            course[title] = _course(r, picked, place)
    clients = {"ids": ids, "samples": samples, "labels": labels, "values": values, "course": course}
    names = runs[0].client_names
    return {**clients, "names": {str(i): names[i] for i in ids}} if names else clients


def _counts(run: Run, z: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the counts of the run's headline on the test parts."""
    return {k.rpartition("/")[2]: v for k, v in z.items() if k.startswith(f"{run.headline}/test/")}


def _values(run: Run, z: dict[str, np.ndarray], place: dict[int, int]) -> list[float | None]:
    out: list[float | None] = [None] * len(place)
    for i, v in zip(z["clients"], run.task.measured(_counts(run, z))[run.metric.name], strict=True):
        if np.isfinite(v) and int(i) in place:
            out[place[int(i)]] = round(run.metric.scale * float(v), _digits(run.metric) + 1)
    return out


def _course(run: Run, rounds: Sequence[int], place: dict[int, int]) -> dict[str, Any]:
    """Return rounds and, for each of them, the metric of all clients."""
    course = []
    for t in rounds:
        try:
            z = run.evaluation(t)
        except CoterieError:  # damaged, which a warning reports
            continue
        if f"{run.headline}/test/loss" in z:
            course.append((t, _values(run, z, place)))
    return {"x": [t for t, _ in course], "y": [row for _, row in course]}


def cluster_data(comparison: Comparison) -> dict[str, Any]:
    """Return method -> clients of each group at the end of the first seed; methods without groups are left out."""
    seed = min(r.settings["seed"] for r in comparison.runs)
    out = {}
    for r in comparison.runs:
        if r.settings["seed"] == seed and r.title not in out and (groups := membership.client_groups(r)):
            kind = membership.group_kind(r)
            out[r.title] = {"seed": str(seed), "edges": kind == "edge", "kind": kind, "groups": groups}
    return out
