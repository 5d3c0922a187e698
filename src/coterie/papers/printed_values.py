"""Compare printed and measured values, with remarks on the differences."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from coterie.papers.presets import Item, is_ours, printed, row_remark, statistic
from coterie.results import paper_metrics
from coterie.results.run import Run
from coterie.results.statistics import rounds_to


def _client(client: int, run: Run) -> float:
    return float(run.clients()["personal/test"][client])


def _participants(run: Run, window: int) -> float:
    """Return the accuracy of participants before training, mean of the last rounds."""
    curve = run.rounds["participants/before/pooled"]
    return float(curve[curve.index > curve.index[-1] - window].mean())


def _clients_megabytes(run: Run) -> float:
    """Return the megabytes on the links of clients; the link between edges and cloud does not count."""
    return float(sum(n for link, n in run.summary()["bytes"].items() if link.startswith("device-")) / 1e6)


STATISTICS: dict[str, Callable[[Run], float]] = {
    "participants_before_last10": lambda r: float(r.summary()["participants_before_last10"]),
    "participants_before_last20": partial(_participants, window=20),
    "clusters": lambda r: float(r.rounds["personal/test/clusters"].dropna().iloc[-1]),
    "clients_mean_best": lambda r: float(r.summary()["personal"]["best"]),
    "ac": lambda r: float(r.summary()["personal"]["last"]),
    "gm": lambda r: paper_metrics.official(r).get("GM", math.nan),
    "pm_v": lambda r: paper_metrics.official(r)["PM(V)"],
    "pm_l": lambda r: paper_metrics.official(r)["PM(L)"],
    "pm_v_trained": lambda r: paper_metrics.official(r, view="trained")["PM(V)"],
    "pm_l_trained": lambda r: paper_metrics.official(r, view="trained")["PM(L)"],
    "global_final": lambda r: float(r.curve("global", "official", "pooled").iloc[-1]),
    "global_best": lambda r: float(r.curve("global", "official", "pooled").max()),
    "rounds_to_70": lambda r: _rounds(r, 0.70),
    "rounds_to_75": lambda r: _rounds(r, 0.75),
    "megabytes": _clients_megabytes,
    **{f"client_{i}": partial(_client, i) for i in range(10)},
}
COUNTS = ("rounds_to_70", "rounds_to_75", "megabytes")  # not in percent, and lower is better


def _rounds(run: Run, target: float) -> float:
    reached = rounds_to(run.curve(), target)
    return math.nan if reached is None else float(reached)


def compare_with_printed(it: Item, runs: Mapping[tuple[str, str, int], Run]) -> pd.DataFrame:
    """Return one row per method and column: printed, measured (mean and std over seeds), difference, remark."""
    rows: list[dict[str, Any]] = []
    for row in it.rows:
        for column in it.columns:
            mine = [r for (a, b, _), r in runs.items() if (a, b) == (row, column)]
            if not mine:
                continue
            name = statistic(it, column, row)
            values = (1 if name in COUNTS else 100) * np.array([STATISTICS[name](r) for r in mine])
            paper = printed().get((it.paper, it.printed_as, row, column))
            measured = float(values.mean())
            remark = row_remark(it, row) or it.misprints.get(f"{row}/{column}", "")
            if math.isnan(measured):
                remark = remark or ("not reached" if name in COUNTS else "the method has no such model")
            rows.append({
                "method": row, "column": column, "printed": paper.value if paper else math.nan, "measured": measured,
                "std": float(values.std(ddof=1)) if len(values) > 1 else math.nan,
                "difference": measured - paper.value if paper else math.nan, "seeds": len(values),
                "remark": remark,
            })  # fmt: skip
    return pd.DataFrame([*rows, *_spread(it, rows)])


def _spread(it: Item, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the row of sample standard deviations over the paper's rows of a column, if the table has one."""
    out = []
    for column in it.columns if it.spread else ():
        values = [r["measured"] for r in rows if r["column"] == column and not is_ours(it, r["method"])]
        if len(values) > 1:
            paper, measured = printed()[it.paper, it.printed_as, it.spread, column].value, float(np.std(values, ddof=1))
            out.append({
                "method": it.spread, "column": column, "printed": paper, "measured": measured, "std": math.nan,
                "difference": measured - paper, "seeds": rows[0]["seeds"],
                "remark": it.misprints.get(f"{it.spread}/{column}", f"deviation over {len(values)} rows"),
            })  # fmt: skip
    return out


def headline_gain(it: Item, table: pd.DataFrame) -> list[str]:
    """Return the gain of the paper's method over the best other method, by column and as the headline's mean."""
    if not it.gain or it.gain["of"] not in set(table["method"]):
        return []
    of, wanted = it.gain["of"], it.gain["over"]
    theirs = table[[r in it.rows and not is_ours(it, r) for r in table["method"]]]
    gains: dict[str, dict[str, float]] = {"printed": {}, "measured": {}}
    for column, part in theirs.groupby("column", sort=False):
        own, others = part[part["method"] == of], part[part["method"] != of]
        for kind, by_column in gains.items():
            if len(own) and len(others) and not math.isnan(value := float(own[kind].iloc[0] - others[kind].max())):
                by_column[str(column)] = value
    words = [f"{c} {v:+.3f} (printed values: {gains['printed'][c]:+.3f})" for c, v in gains["measured"].items()]
    out = [f"{of} minus the best other method: {', '.join(words)}"] if words else []
    if set(wanted) <= gains["measured"].keys():
        here, there = (float(np.mean([gains[kind][c] for c in wanted])) for kind in ("measured", "printed"))
        out.append(f"mean over {', '.join(wanted)}: {here:+.3f}; printed values: {there:+.3f}; {it.gain['claim']}")
    return out


def printed_verdicts(it: Item, table: pd.DataFrame) -> list[str]:
    """Return for each column the rank correlation over the paper's methods, and the winners in the paper and here."""
    out = headline_gain(it, table)
    table = table[table["method"] != it.spread]
    for column in dict.fromkeys(table["column"]):
        both = table[(table["column"] == column) & table["printed"].notna() & table["measured"].notna()]
        if len(both) < 3:
            continue
        fewer = statistic(it, column) in COUNTS
        theirs, ours = (_winners(both, k, fewer) for k in ("printed", "measured"))
        equal = any(both[k].nunique() == 1 for k in ("printed", "measured"))
        rho = "not defined" if equal else f"{float(spearmanr(both['printed'], both['measured']).statistic):.2f}"
        won = f"{theirs} in the paper and here" if theirs == ours else f"{theirs} in the paper, {ours} here"
        out.append(f"{column}: rank correlation {rho} over {len(both)} methods; best: {won}")
    return out


def _winners(both: pd.DataFrame, kind: str, lower: bool) -> str:
    """Return the method with the best value, or all methods of an exact tie."""
    best = both[kind].min() if lower else both[kind].max()
    names = [str(name) for name in both.loc[both[kind] == best, "method"]]
    return names[0] if len(names) == 1 else f"a tie of {', '.join(names)}"


def printed_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table as text, for a screen or Markdown."""
    out = table[["method", "column"]].copy()
    out["printed"] = ["" if math.isnan(v) else f"{v:.2f}" for v in table["printed"]]
    out["measured"] = [
        "" if math.isnan(v) else f"{v:.2f}" + ("" if math.isnan(s) else f" ± {s:.2f}")
        for v, s in zip(table["measured"], table["std"], strict=True)
    ]
    out["difference"] = ["" if math.isnan(v) else f"{v:+.2f}" for v in table["difference"]]
    out["remark"] = table["remark"]
    return out.set_index("method")
