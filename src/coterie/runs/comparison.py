"""Several runs side by side: one table, mean and standard deviation over seeds."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from coterie.errors import CoterieError
from coterie.runs.run import Run

# column -> (view or key of the summary, statistic)
COLUMNS = {
    "personal": ("personal", "last"),
    "worst 10%": ("personal", "worst10"),
    "std": ("personal", "std"),
    "pooled": ("personal", "pooled"),
    "last 10": ("personal", "last10"),
    "selected": ("personal", "selected"),
    "best": ("personal", "best"),
    "global": ("global", "last"),
    "trained": ("trained", "last"),
    "adapted": ("adapted", "last"),
    "newcomers": ("newcomers/personal", "last"),
}


BRIEF = ("personal", "worst 10%", "selected", "global", "trained", "adapted")


class Comparison:
    """Runs grouped by method; every number is a mean over seeds, with its standard deviation beside it."""

    def __init__(self, runs: Sequence[Run]):
        if not runs:
            raise CoterieError("there is nothing to compare")
        self.runs = list(runs)
        self.titles = list(dict.fromkeys(r.title for r in self.runs))

    def table(self) -> pd.DataFrame:
        """One row per method: accuracy columns (mean), their std over seeds (`± ...`), bytes and seconds per round."""
        rows = {}
        for title in self.titles:
            summaries = [r.summary() for r in self.runs if r.title == title]
            row: dict[str, Any] = {"seeds": len(summaries), "rounds": min(s["rounds"] for s in summaries)}
            for name, (view, statistic) in COLUMNS.items():
                values = [s[view][statistic] for s in summaries if statistic in s.get(view, {})]
                if values:
                    row[name] = float(np.mean(values))
                    row[f"± {name}"] = float(np.std(values, ddof=1)) if len(values) > 1 else np.nan
            for direction in ("up", "down"):
                per_round = [
                    sum(v for k, v in s["bytes_per_round"].items() if k.endswith(direction)) for s in summaries
                ]
                row[f"MB {direction}"] = float(np.mean(per_round)) / 1e6
            row["s/round"] = float(np.mean([s.get("seconds_per_round", np.nan) for s in summaries]))
            rows[title] = row
        frame = pd.DataFrame(rows).T
        frame.index.name = "method"
        return frame

    def readable(self, brief: bool = False) -> pd.DataFrame:
        """The same as text, accuracies in percent; `brief`: the columns that fit a narrow screen."""
        frame = self.table()
        out = pd.DataFrame(index=frame.index)
        for name in BRIEF if brief else COLUMNS:
            if name in frame and frame[name].notna().any():
                spread = frame[f"± {name}"]
                out[name] = [
                    "" if pd.isna(v) else f"{100 * v:.1f}" + ("" if pd.isna(s) else f" ± {100 * s:.1f}")
                    for v, s in zip(frame[name], spread, strict=True)
                ]
        out["MB up"] = [f"{v:.3g}" for v in frame["MB up"]]
        out["MB down"] = [f"{v:.3g}" for v in frame["MB down"]]
        out["s/round"] = [f"{v:.3f}" for v in frame["s/round"]]
        return out

    def markdown(self) -> str:
        frame = self.readable()
        head = ["method", *map(str, frame.columns)]
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += [
            "| " + " | ".join([str(i), *map(str, row)]) + " |" for i, row in zip(frame.index, frame.values, strict=True)
        ]
        return "\n".join(lines) + "\n"

    def curves(self, view: str = "personal", part: str = "test", statistic: str = "mean") -> pd.DataFrame:
        """One column per method, mean over seeds, by evaluated round."""
        columns = {}
        for title in self.titles:
            found = [r.curve(view, part, statistic) for r in self.runs if r.title == title]
            columns[title] = pd.concat(found, axis=1).mean(axis=1)
        return pd.DataFrame(columns)
