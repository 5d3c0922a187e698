"""Compare printed and measured values, with remarks on the differences."""

import math
from collections.abc import Callable, Mapping, Sequence
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
    "ac_edge": lambda r: float(r.summary().get("edge", {}).get("last", math.nan)),
    "gm": lambda r: paper_metrics.official(r).get("GM", math.nan),
    "pm_v": lambda r: paper_metrics.official(r)["PM(V)"],
    "pm_l": lambda r: paper_metrics.official(r)["PM(L)"],
    "pm_v_trained": lambda r: paper_metrics.official(r, view="trained")["PM(V)"],
    "pm_l_trained": lambda r: paper_metrics.official(r, view="trained")["PM(L)"],
    "global_final": lambda r: float(r.curve("global", "official", "pooled").iloc[-1]),
    "global_best": lambda r: float(r.curve("global", "official", "pooled").max()),
    "global_loss": lambda r: float(r.curve("global", "official", "loss").iloc[-1]),
    "train_loss_final": lambda r: float(_train_loss(r).iloc[-1]),
    "train_loss_best": lambda r: float(_train_loss(r)[r.curve("global", "official", "pooled").idxmax()]),
    "clustering_round": paper_metrics.clustering_round,
    "aun_rise": paper_metrics.aun_rise,
    "rounds_to_70": lambda r: _rounds(r, 0.70),
    "rounds_to_75": lambda r: _rounds(r, 0.75),
    "megabytes": _clients_megabytes,
    **{f"client_{i}": partial(_client, i) for i in range(10)},
    **{f"clients_with_{k}": partial(paper_metrics.clients_with_layer, layer=k) for k in ("fc1", "fc2", "classifier")},
}
RELATIVE: dict[str, Callable[[Run, Sequence[Run]], float]] = {  # a run against rivals with the same data and seed
    "ahead_from": lambda r, rivals: _ahead_from(_global(r), [_global(x) for x in rivals]),
    "lead": lambda r, rivals: float(_global(r).iloc[-1] - max(_global(x).iloc[-1] for x in rivals)),
}
LOWER_IS_BETTER = (  # not in percent, and lower is better
    "rounds_to_70", "rounds_to_75", "megabytes", "global_loss", "train_loss_final", "train_loss_best",
    "clustering_round", "aun_rise", "ahead_from",
)  # fmt: skip
NOT_IN_PERCENT = (*LOWER_IS_BETTER, "clients_with_fc1", "clients_with_fc2", "clients_with_classifier")
_WITHOUT = {  # remarks on a missing value
    "clustering_round": "no clusters", "aun_rise": "no clusters", "ahead_from": "not ahead at the end",
}  # fmt: skip


def _global(run: Run) -> pd.Series:
    return run.curve("global", "official", "pooled")


def _train_loss(run: Run) -> pd.Series:
    return run.rounds["note/train_loss"].dropna()


def _ahead_from(own: pd.Series, others: Sequence[pd.Series]) -> float:
    """Return the first round from which a curve stays above all others to the end; NaN if it is not above at last."""
    above = (pd.concat(others, axis=1).max(axis=1).reindex(own.index) < own).to_numpy()
    behind = np.flatnonzero(~above)
    if len(behind) == 0:
        return float(own.index[0])
    return float(own.index[behind[-1] + 1]) if behind[-1] + 1 < len(own) else math.nan


def _rounds(run: Run, target: float) -> float:
    reached = rounds_to(run.curve(), target)
    return math.nan if reached is None else float(reached)


def compare_with_printed(it: Item, runs: Mapping[tuple[str, str, int], Run]) -> pd.DataFrame:
    """Return one row per method and column: printed, measured (mean and std over seeds), difference, remark."""
    rows: list[dict[str, Any]] = []
    for row in it.rows:
        for column in it.columns:
            name = statistic(it, column, row)
            values = (1 if name in NOT_IN_PERCENT else 100) * np.array(_values(it, row, column, name, runs))
            if not len(values):
                continue
            paper = printed().get((it.paper, it.printed_as, row, column))
            measured = float(values.mean())
            remark = row_remark(it, row) or it.misprints.get(f"{row}/{column}", "")
            if math.isnan(measured):
                without = "not reached" if name in LOWER_IS_BETTER else "the method has no such model"
                remark = remark or _WITHOUT.get(name, without)
            if name in ("ac", "ac_edge"):
                mine = [run for (a, b, _), run in runs.items() if (a, b) == (row, column)]
                remark = "; ".join(filter(None, (remark, _undivided(mine))))
            rows.append({
                "method": row, "column": column, "printed": paper.value if paper else math.nan, "measured": measured,
                "std": float(values.std(ddof=1)) if len(values) > 1 else math.nan,
                "difference": measured - paper.value if paper else math.nan, "seeds": len(values),
                "remark": remark,
            })  # fmt: skip
    return pd.DataFrame([*rows, *_spread(it, rows)])


def _undivided(runs: Sequence[Run]) -> str:
    """Return a remark if runs of a method with clusters never divided the clients."""
    one = [r for r in runs if "clusters" in r.events[-1]["facts"] and math.isnan(paper_metrics.clustering_round(r))]
    return f"one cluster to the end{f' in {len(one)} of {len(runs)} runs' * (len(one) < len(runs))}" if one else ""


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
    of, wanted = it.gain["of"], it.gain.get("over", it.columns)
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
        where = ", ".join(wanted) if "over" in it.gain else f"these {len(wanted)} columns"
        out.append(f"mean over {where}: {here:+.3f}; printed values: {there:+.3f}; {it.gain['claim']}")
    return out


def _values(it: Item, row: str, column: str, name: str, runs: Mapping[tuple[str, str, int], Run]) -> list[float]:
    """Return a statistic of the runs of a cell, one per seed; none without the runs that it needs."""
    mine = {seed: run for (a, b, seed), run in runs.items() if (a, b) == (row, column)}
    if name not in RELATIVE:
        return [STATISTICS[name](run) for run in mine.values()]
    rivals = {seed: [runs[r, column, seed] for r in it.rivals if (r, column, seed) in runs] for seed in mine}
    return [RELATIVE[name](run, rivals[s]) for s, run in mine.items() if rivals[s] and row not in it.rivals]


def printed_verdicts(it: Item, table: pd.DataFrame) -> list[str]:
    """Return for each column the rank correlation over the paper's methods, and the winners in the paper and here."""
    out = headline_gain(it, table)
    table = table[table["method"] != it.spread]
    for column in dict.fromkeys(table["column"]):
        both = table[(table["column"] == column) & table["printed"].notna() & table["measured"].notna()]
        if len(both) < 3:
            continue
        fewer = statistic(it, column) in LOWER_IS_BETTER
        theirs, ours = (_winners(both, k, fewer) for k in ("printed", "measured"))
        equal = any(both[k].nunique() == 1 for k in ("printed", "measured"))
        rho = "not defined" if equal else f"{float(spearmanr(both['printed'], both['measured']).statistic):.2f}"
        won = f"{theirs} in the paper and here" if theirs == ours else f"{theirs} in the paper, {ours} here"
        out.append(f"{column}: rank correlation {rho} over {len(both)} methods; best: {won}")
    return out + _gain_verdicts(it, table)


def _gain_verdicts(it: Item, table: pd.DataFrame) -> list[str]:
    """Return for each claim the least and the largest gain of a row over those of the other rows that were run."""
    value = {(r["method"], r["column"]): float(r["measured"]) for _, r in table.iterrows()}
    out = []
    for claim in it.gain_ranges:
        row = claim["row"]
        pairs = [(r, c) for r in claim["over"] for c in claim["columns"] if {(row, c), (r, c)} <= value.keys()]
        if pairs:
            gains = [value[row, c] - value[r, c] for r, c in pairs]
            others, columns = (", ".join(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
            words = f"{row} minus {others} at {columns}: {min(gains):+.2f} to {max(gains):+.2f} points"
            out.append(f"{words} ({claim['printed']} in the paper)")
    return out


def _winners(both: pd.DataFrame, kind: str, lower: bool) -> str:
    """Return the method with the best value, or all methods of an exact tie."""
    best = both[kind].min() if lower else both[kind].max()
    names = [str(name) for name in both.loc[both[kind] == best, "method"]]
    return names[0] if len(names) == 1 else f"a tie of {', '.join(names)}"


def printed_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table as text, for a screen or Markdown; numbers below one have three digits, others two."""
    rows = []
    for _, r in table.iterrows():
        digits = 3 if np.nanmax([abs(r["printed"]), abs(r["measured"]), 0]) < 1 else 2

        def text(value: float, form: str, digits: int = digits) -> str:
            return "" if math.isnan(value) else form.format(f"{value:.{digits}f}")

        rows.append({
            "method": r["method"], "column": r["column"], "printed": text(r["printed"], "{}"),
            "measured": text(r["measured"], "{}") + text(r["std"], " ± {}"),
            "difference": text(r["difference"], "{}" if r["difference"] < 0 else "+{}"), "remark": r["remark"],
        })  # fmt: skip
    return pd.DataFrame(rows).set_index("method")
