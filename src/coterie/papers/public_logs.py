"""Compare our baselines with the public training logs of FedCMD's authors: windows of ten rounds, same protocol."""

import csv
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import numpy as np
import pandas as pd

from coterie.errors import CoterieError
from coterie.papers.presets import Item
from coterie.results.run import Run

NOTE = (
    "theirs is one run with public window means only, so its scatter is assumed to equal ours: "
    "the standard error of the difference is sqrt(2) times that of our window"
)


@cache
def windows() -> dict[tuple[str, str, str], dict[str, float]]:
    """Return (alpha, data, method) -> window, such as before_191_200 -> percent."""
    with (files("coterie.papers") / "public.csv").open() as f:
        return {
            (r["alpha"], r["data"], r["method"]): {k: float(v) for k, v in r.items() if "_" in k and v}
            for r in csv.DictReader(f)
        }


def window(run: Run, name: str) -> tuple[float, float]:
    """Return the mean over the rounds of a window in percent and its standard error; NaN if the run is too short."""
    when, first, last = name.split("_")
    column = f"participants/{when}/pooled"
    if column not in run.rounds:
        raise CoterieError(f"{run.path} did not watch its participants; run it with watch = true")
    values = 100 * run.rounds.loc[int(first) : int(last), column].dropna()
    if len(values) < int(last) - int(first) + 1:
        return math.nan, math.nan
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def compare_with_logs(it: Item, runs: Mapping[tuple[str, str, int], Run]) -> pd.DataFrame:
    """Return one row per method, column and window: theirs, ours, standard error, distance in standard errors."""
    rows = []
    for (row, column, _), run in runs.items():
        alpha = re.findall(r"[\d.]+", run.settings["federation"]["partition"])[0]
        published = windows().get((f"{float(alpha):.1f}", str(run.settings["data"]), row), {})
        for name, value in published.items():
            ours, error = window(run, name)
            if math.isnan(ours):
                continue
            apart = (ours - value) / (math.sqrt(2) * error) if error else math.copysign(np.inf, ours - value)
            rows.append({
                "method": row, "column": column, "window": name.replace("_", " ", 1).replace("_", " to "),
                "theirs": value, "ours": ours, "standard error": error, "apart": apart, "within two": abs(apart) <= 2,
            })  # fmt: skip
    if not rows:
        raise CoterieError(f"none of the finished runs has a public log; run {it.paper} table7 first")
    return pd.DataFrame(rows)


def log_verdicts(table: pd.DataFrame) -> list[str]:
    """Return for each column the windows within two standard errors, and the methods whose last window is not."""
    out = []
    for column, part in table.groupby("column", sort=False):
        last = part[part["window"].str.startswith("before")].groupby("method", sort=False).tail(1)
        far = list(last.loc[~last["within two"], "method"])
        text = f"{column}: {int(part['within two'].sum())} of {len(part)} windows within two standard errors"
        out.append(text + (f"; the last window before training is further apart for {', '.join(far)}" if far else ""))
    return out


def log_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table as text, for a screen or Markdown."""
    out = table[["method", "column", "window"]].copy()
    out["theirs"] = [f"{v:.2f}" for v in table["theirs"]]
    out["ours"] = [f"{v:.2f} ± {s:.2f}" for v, s in zip(table["ours"], table["standard error"], strict=True)]
    out["difference (SE)"] = [f"{v:+.1f}" for v in table["apart"]]
    out["within two"] = ["yes" if v else "no" for v in table["within two"]]
    return out.set_index("method")
