"""The numbers of a report, as plain values: what its tables say and what its script draws."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.core.tasks import Metric
from coterie.errors import CoterieError
from coterie.results import controls as paired
from coterie.results.comparison import Comparison
from coterie.results.report import membership
from coterie.results.run import Run

VIEWS = {
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
MEANING = {  # the statistic behind each column
    "personal": "what a client would use now, mean over clients, last evaluation",
    "worst 10%": "the same, mean of the worst tenth of clients",
    "std": "the same, standard deviation over clients",
    "pooled": "the same, over all test samples together",
    "last 10": "the same, mean over the last 10 rounds",
    "selected": "the same, at the round chosen on validation data",
    "best": "the same, at the best test round (optimistic)",
    "global": "global model, mean over clients",
    "trained": "after local training, mean over clients",
    "adapted": "after fine-tuning, mean over clients",
    "received": "as received, before local training, mean over clients",
    "edge": "model of the cluster or edge, else the global one; mean over clients",
    "clusters": "the same, mean over clusters of their clients' mean",
    "newcomer": "clients that never trained, without training, mean over them",
    "newcomer adapted": "the same after fine-tuning on their own data, last round",
    "diverged": "clients whose models give NaN or infinity",
    "MB up": "sent by clients, per round",
    "MB down": "sent to clients, per round",
    "s/round": "median time of a round",
}
OF_METRIC = (
    "personal", "worst 10%", "pooled", "selected", "last 10", "best", "global", "trained", "adapted", "received",
    "edge", "clusters",
)  # fmt: skip
NUMBERS = 200_000  # of clients' curves on one page; with more of them, fewer rounds are kept, then none


def group_name(name: str, comparison: Comparison) -> str:
    partition = comparison.runs[0].description["partition"]
    return name or f"{partition['data']}, {partition['partition']}"


def local_title(comparison: Comparison) -> str | None:
    """The runs that others are compared with: training alone."""
    return next((r.title for r in comparison.runs if r.settings["method"] == "local"), None)


# ---- tables ----------------------------------------------------------------------------------------------------------
def summary(comparison: Comparison) -> dict[str, Any]:
    """The comparison's table as text, with the value behind each cell, and what is best or a tie."""
    table, readable = comparison.table(), comparison.readable()
    seeds = {t: int(n) for t, n in table["seeds"].items()}
    rows = []
    for title in readable.index:
        cells = []
        for c in readable.columns:
            value = float(table.loc[title, c]) if c in table else float("nan")
            if c == "diverged":
                value = float(table.loc[title, "diverged"])
            cells.append({"text": readable.loc[title, c], "value": None if np.isnan(value) else value})
        rows.append({"title": title, "cells": cells})
    marks = winners(comparison)
    for row in rows:
        for name, cell in zip(readable.columns, row["cells"], strict=True):
            first = marks.get(name, ())
            cell["best"], cell["tie"] = row["title"] in first, row["title"] in first and len(first) > 1
    partition = comparison.runs[0].description["partition"]
    same = len(set(seeds.values())) == 1
    return {
        "metric": comparison.metric.heading,
        "text": f"{partition['clients']} clients, {partition['dealt']:,} samples"
        + (f", {next(iter(seeds.values()))} seeds" if same and seeds and max(seeds.values()) > 1 else ""),
        "columns": [{"name": c, "meaning": MEANING.get(c, "")} for c in readable.columns],
        "rows": rows,
        "spread": max(seeds.values(), default=1) > 1,
        "ties": any(len(v) > 1 for v in marks.values()),
    }


def winners(comparison: Comparison) -> dict[str, list[str]]:
    """The methods with the best mean in each column of the metric; several if the table shows the same number."""
    table, out = comparison.table(), {}
    if len(table) < 2:
        return {}
    for name in OF_METRIC:
        if name in table and table[name].notna().any():
            shown = {str(t): comparison.metric.text(v) for t, v in table[name].astype(float).dropna().items()}
            values = table[name].astype(float)
            best = shown[str(values.idxmin() if comparison.metric.lower else values.idxmax())]
            out[name] = [t for t, text in shown.items() if text == best]
    return out


def gained(comparison: Comparison) -> dict[str, list[tuple[int, int, float]]]:
    """Title -> (seed, client, what it gains against Local-Only), over all seeds that have both."""
    base = local_title(comparison)
    if base is None:
        return {}
    alone = {r.settings["seed"]: f for r in comparison.runs if r.title == base and (f := _scored(r)) is not None}
    out: dict[str, list[tuple[int, int, float]]] = {}
    for r in comparison.runs:
        seed = r.settings["seed"]
        if r.title == base or seed not in alone or (mine := _scored(r)) is None:
            continue
        difference = _sign(comparison.metric) * comparison.metric.scale * (mine - alone[seed]).dropna()
        digits = _digits(comparison.metric) + 1
        out.setdefault(r.title, []).extend((seed, int(i), round(float(v), digits)) for i, v in difference.items())
    return out


def _scored(run: Run) -> Any:
    """The metric of personal models by client at the last evaluation; None if there is none that can be read."""
    try:
        frame = run.clients()
    except CoterieError:  # not evaluated yet, or damaged: then a warning says so
        return None
    return frame["personal/test"].dropna() if "personal/test" in frame else None


def gains(comparison: Comparison) -> dict[str, Any] | None:
    """How many clients do better and worse than alone."""
    found = gained(comparison)
    if not found:
        return None
    rows = []
    for title, mine in found.items():
        values = np.array([v for *_, v in mine])
        up, down = int((values > 0).sum()), int((values < 0).sum())
        rows.append({
            "title": title, "up": up, "same": len(values) - up - down, "down": down, "mean": float(values.mean()),
            "median": float(np.median(values)), "least": float(values.min()), "most": float(values.max()),
        })  # fmt: skip
    metric = comparison.metric
    return {
        "base": local_title(comparison), "rows": rows, "unit": _unit(metric), "digits": _digits(metric),
        "metric": metric.name,
    }  # fmt: skip


def against(comparison: Comparison) -> dict[str, Any] | None:
    """Paired differences to controls, and what to know about them."""
    arena, metric = paired.Arena(comparison.runs, view=comparison.view), comparison.metric
    if not arena.pairs:
        return None
    rows = []
    for p in arena.pairs:
        d = p.difference
        cells = [
            (paired.scored(metric, p.against_mean, p.against_std), p.against_mean),
            (paired.gained(metric, d.mean), d.mean),
            (f"{paired.gained(metric, d.low)} to {paired.gained(metric, d.high)}", d.low),
            *((n, n) for n in (d.gain, d.lose, d.tie)),
        ]
        rows.append({"method": p.row.title, "label": p.row.label, "against": p.against.label, "cells": cells})
    return {"rows": rows, "metric": metric.name, "covers": f"{arena.covers().capitalize()}.", "notes": arena.warnings()}


def sent(comparison: Comparison) -> list[list[Any]]:
    rows = []
    for title in comparison.titles:
        found = next(r for r in comparison.runs if r.title == title).summary()
        for link, total in sorted(found["bytes"].items()):
            rows.append([title, link.replace("/", ", "), found["bytes_per_round"].get(link, 0.0) / 1e6, total / 1e6])
    return rows


# ---- what the script draws -------------------------------------------------------------------------------------------
def drawn(group: str, comparison: Comparison) -> dict[str, Any]:
    return {
        "name": group_name(group, comparison),
        "methods": comparison.titles,
        "metric": described(comparison.metric),
        "local": local_title(comparison),
        "curves": lines(comparison),
        "gains": gained(comparison),
        "costs": costs(comparison),
        "clients": clients(comparison),
        "clusters": clusters(comparison),
    }


def described(metric: Metric) -> dict[str, Any]:
    """What the script must know to show numbers of a metric; `sign` is -1 where lower is better."""
    return {
        "name": metric.name, "label": metric.label, "percent": metric.percent, "sign": _sign(metric),
        "digits": _digits(metric), "unit": _unit(metric),
    }  # fmt: skip


def _sign(metric: Metric) -> int:
    return -1 if metric.lower else 1


def _digits(metric: Metric) -> int:
    return 1 if metric.percent else 3


def _unit(metric: Metric) -> str:
    return "points" if metric.percent else metric.name


def lines(comparison: Comparison) -> dict[str, dict[str, dict[str, list[float]]]]:
    """View -> method -> rounds, mean and spread over seeds, cumulative megabytes."""
    out: dict[str, dict[str, dict[str, list[float]]]] = {}
    scale = comparison.metric.scale
    for view in dict.fromkeys((f"{comparison.view}/test/mean", *VIEWS)):  # the headline first
        for title in comparison.titles:
            frames = [r.rounds for r in comparison.runs if r.title == title and view in r.rounds]
            if not frames:
                continue
            found = [f[view].dropna() for f in frames]
            rounds = sorted(set.intersection(*(set(f.index) for f in found)))
            if not rounds:
                continue
            values = np.array([[float(f[t]) for t in rounds] for f in found])
            spent = np.mean(
                [f.filter(like="bytes/").fillna(0).sum(axis=1).cumsum()[rounds].values for f in frames], axis=0
            )
            out.setdefault(view, {})[title] = {
                "x": [int(t) for t in rounds],
                "y": [round(scale * v, 4) for v in values.mean(0)],
                "s": [round(scale * v, 4) for v in values.std(0, ddof=min(1, len(values) - 1))],
                "mb": [round(float(v) / 1e6, 4) for v in spent],
            }
    return out


def costs(comparison: Comparison) -> dict[str, dict[str, float]]:
    """Method -> megabytes sent in all and the last metric of personal models, means over seeds."""
    out = {}
    for title in comparison.titles:
        found = [s for r in comparison.runs if r.title == title and "personal" in (s := r.summary())]
        values = [comparison.metric.scale * s["personal"]["last"] for s in found if np.isfinite(s["personal"]["last"])]
        if values:
            sizes = [sum(s["bytes"].values()) / 1e6 for s in found]
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            out[title] = {"mb": float(np.mean(sizes)), "y": float(np.mean(values)), "s": spread}
    return out


def clients(comparison: Comparison) -> dict[str, Any]:
    """Seed -> every client's samples, test labels if there are classes, metric by method and its course over rounds."""
    seeds = sorted({r.settings["seed"] for r in comparison.runs})
    kept = _kept_rounds(comparison, seeds)
    out = {}
    for seed in seeds:
        mine = [r for r in comparison.runs if r.settings["seed"] == seed]
        found = _of_seed(list({r.title: r for r in reversed(mine)}.values())[::-1], kept)
        if found["ids"]:
            out[str(seed)] = found
    return out


def _kept_rounds(comparison: Comparison, seeds: Sequence[int]) -> int:
    """Evaluated rounds of each client's curve that a page has room for."""
    curves = len(comparison.runs) * int(comparison.runs[0].description["partition"]["clients"])
    room = NUMBERS // max(1, curves)
    return 0 if room < 3 else min(room, 40)


def _of_seed(runs: Sequence[Run], kept: int) -> dict[str, Any]:
    frames = {}
    for r in runs:
        try:
            frames[r.title] = r, r.evaluation()
        except CoterieError:  # not evaluated yet, or damaged: then a warning says so
            continue
    frames = {t: (r, z) for t, (r, z) in frames.items() if "personal/test/loss" in z}
    ids = sorted({int(i) for _, z in frames.values() for i in z["clients"]})
    place = {i: k for k, i in enumerate(ids)}
    samples: list[int] = [0] * len(ids)
    labels: list[list[int]] = [[] for _ in ids]
    values: dict[str, list[float | None]] = {}
    course: dict[str, dict[str, Any]] = {}
    for title, (r, z) in frames.items():
        totals = z.get("personal/test/total", np.zeros((len(z["clients"]), 0), np.int64))
        for i, n, total in zip(z["clients"], r.task.samples(_counts(z)), totals, strict=True):
            samples[place[int(i)]], labels[place[int(i)]] = int(n), [int(k) for k in total]
        values[title] = _values(r, z, place)
        rounds = [e["round"] for e in r.events if "evaluation" in e]
        if kept and len(rounds) > 1:
            picked = sorted({rounds[int(k)] for k in np.linspace(0, len(rounds) - 1, min(kept, len(rounds)))})
            course[title] = _course(r, picked, place)
    found = {"ids": ids, "samples": samples, "labels": labels, "values": values, "course": course}
    names = runs[0].client_names
    return {**found, "names": {str(i): names[i] for i in ids}} if names else found


def _counts(z: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the personal models on the test parts."""
    return {k.rpartition("/")[2]: v for k, v in z.items() if k.startswith("personal/test/")}


def _values(run: Run, z: dict[str, np.ndarray], place: dict[int, int]) -> list[float | None]:
    out: list[float | None] = [None] * len(place)
    for i, v in zip(z["clients"], run.task.measured(_counts(z))[run.metric.name], strict=True):
        if np.isfinite(v) and int(i) in place:
            out[place[int(i)]] = round(run.metric.scale * float(v), _digits(run.metric) + 1)
    return out


def _course(run: Run, rounds: Sequence[int], place: dict[int, int]) -> dict[str, Any]:
    """Rounds, and for each of them the metric of all clients."""
    found = []
    for t in rounds:
        try:
            z = run.evaluation(t)
        except CoterieError:  # a warning names it
            continue
        if "personal/test/loss" in z:
            found.append((t, _values(run, z, place)))
    return {"x": [t for t, _ in found], "y": [row for _, row in found]}


def clusters(comparison: Comparison) -> dict[str, Any]:
    """Method -> who is with whom at the end, of the first seed; methods without clusters are left out."""
    seed = min(r.settings["seed"] for r in comparison.runs)
    out = {}
    for r in comparison.runs:
        if r.settings["seed"] == seed and r.title not in out and (found := membership.found(r)):
            kind = membership.kind(r)
            out[r.title] = {"seed": str(seed), "edges": kind == "edge", "kind": kind, "groups": found}
    return out
