"""Several runs in one table: mean and standard deviation over seeds."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from coterie.core.metrics import NAMED_METRICS, Metric
from coterie.core.views import VIEWS
from coterie.errors import CoterieError, unknown
from coterie.results.bootstrap import COVERAGE, resampled
from coterie.results.controls import ControlTable, headline_view
from coterie.results.run import IN_USE, Run
from coterie.results.tables import latex_table, markdown_table

WORK = {"steps": "steps", "samples": "samples", "CPU s": "cpu"}  # columns of local training, and their names in a run
MODEL = "model"  # column with the view of each row, if they differ
ATTACK = "attack success"  # column with the share of test items that an attack has classified as it wants
HIDDEN_COLUMNS = ("clusters", "received", "edge")  # shown in tables on request only; files have them


def _columns(view: str) -> dict[str, tuple[str, str]]:
    """Return column -> (key of the summary, statistic); the headline comes first, then further statistics of it.

    The key IN_USE, which an empty view stands for, is the headline of each run.
    """
    view = view or IN_USE
    first = {
        view: "last", "worst 10%": "worst10", "std": "std", "pooled": "pooled", "clusters": "clusters",
        "last 10": "last10", "selected": "selected", "best": "best",
    }  # fmt: skip
    others = [v for v in VIEWS if v != view]
    return {
        **{name: (view, statistic) for name, statistic in first.items()},
        **{v: (v, "last") for v in others},
        "newcomer": ("newcomers/personal", "last"),
        "newcomer adapted": ("newcomers/adapted", "last"),
        ATTACK: ("attack", "last"),
    }


def check_columns(also: Sequence[str]) -> None:
    """Raise CoterieError if a column that is shown on request does not exist."""
    for name in also:
        if name not in HIDDEN_COLUMNS:
            raise unknown("column", name, HIDDEN_COLUMNS)


class Comparison:
    """Runs grouped by method; every number is a mean over seeds, with its standard deviation."""

    def __init__(
        self,
        runs: Sequence[Run],
        methods: Sequence[str] = (),
        against: Sequence[str] = (),
        view: str = "",
        also: Sequence[str] = (),
    ):
        """Compare runs.

        `methods` are compared with the controls `against` (default: the controls that the methods name). `view` is the
        headline (default: that of each run), and `also` lists columns that are shown on request only.
        """
        if not runs:
            raise CoterieError("give at least one run to compare")
        self.view = headline_view(runs, view)
        self.first = self.view or IN_USE  # name of the first column
        self.metrics = tuple({m.name: m for r in runs for m in r.task.reported}.values())
        self.added = {m.name for r in runs for m in r.task.added if m.is_number}
        self.columns = _columns(self.view) | {m.name: (self.first, m.name) for m in self.metrics[1:]}
        self.columns |= {
            f"pooled {name}": (self.first, f"pooled {name}") for name in self.columns if name in self.added
        }
        check_columns(also)
        self._hidden = {c for c in HIDDEN_COLUMNS if c not in also and c != self.view}
        self.runs, self._methods, self._against = list(runs), list(methods), list(against)
        self.titles = list(dict.fromkeys(r.title for r in self.runs))

    def __repr__(self) -> str:
        return f"{self.heading}\n{self.readable(brief=True).to_string()}"

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.warnings())
        return f"<p>{escape(self.heading)}</p>{self.readable().to_html()}" + (f"<ul>{notes}</ul>" if notes else "")

    @property
    def heading(self) -> str:
        """The meaning of the numbers in the table."""
        return f"{self.metric.heading}, mean over clients; bytes and time per round"

    def arena(self, view: str = "", against: Sequence[str] = (), methods: Sequence[str] = ()) -> ControlTable:
        """Return the differences of methods and their controls, paired by client and seed."""
        return ControlTable(self.runs, against or self._against, view or self.view, methods or self._methods)

    @property
    def metric(self) -> Metric:
        return self.metrics[0]

    def table(self) -> pd.DataFrame:
        """Return one row per method: means of the metric, std over seeds (`± ...`), bytes and time per round.

        `steps`, `samples` and `CPU s` are the local training of all clients in the whole run, the fine-tuning of the
        view `adapted` included where that is the headline.

        If the headlines of the runs differ, the first column is `in use`, and `model` names the view of each row.
        `diverged` is the number of the scored `clients` whose personal models give NaN or infinity; if all of them do,
        the value is missing. Further metrics of the task are those of the headline.
        """
        rows = {}
        for title in self.titles:
            mine = [r for r in self.runs if r.title == title]
            summaries = [
                {**s, **({IN_USE: s[r.headline]} if r.headline in s else {})} for r in mine for s in [r.summary()]
            ]
            row: dict[str, Any] = {"seeds": len(summaries), "rounds": min(s["rounds"] for s in summaries)}
            if not self.view:
                row[MODEL] = " or ".join(dict.fromkeys(r.headline for r in mine))
            for name, (view, statistic) in self.columns.items():
                sound = [s[view] for s in summaries if view in s and not _diverged(s[view], statistic)]
                values = [v[statistic] for v in sound if statistic in v and not np.isnan(v[statistic])]
                if values:
                    row[name] = float(np.mean(values))
                    row[f"± {name}"] = float(np.std(values, ddof=1)) if len(values) > 1 else np.nan
                elif any(view in s and statistic in s[view] for s in summaries):
                    row[name] = row[f"± {name}"] = np.nan
            scored = [s["personal"] for s in summaries if "personal" in s]
            row["diverged"] = sum(v["nonfinite"] for v in scored)
            row["clients"] = sum(v["clients"] for v in scored)
            for direction in ("up", "down"):
                per_round = [
                    sum(v for k, v in s["bytes_per_round"].items() if k.endswith(direction)) for s in summaries
                ]
                row[f"MB {direction}"] = float(np.mean(per_round)) / 1e6
            work = [r.work(self.view) for r in self.runs if r.title == title]
            for name, key in WORK.items():
                row[name] = float(np.mean([w.get(key, np.nan) for w in work]))
            row["s/round"] = float(np.mean([s.get("seconds_per_round", np.nan) for s in summaries]))
            rows[title] = row
        frame = pd.DataFrame(rows).T
        frame.index.name = "method"
        return frame

    def readable(self, brief: bool = False) -> pd.DataFrame:
        """Return the table as text, accuracies in percent; `brief`: the columns that fit a narrow screen."""
        frame = self.table()
        out = pd.DataFrame(index=frame.index)
        more = ("personal", "global", "trained", "adapted", "newcomer", "newcomer adapted", ATTACK)
        main = (
            self.first,
            "worst 10%",
            *HIDDEN_COLUMNS,
            "selected",
            *more,
            *(c for c in self.columns if c in self.added),
        )
        others = {column: m for m in self.metrics[1:] for column in (m.name, f"pooled {m.name}")}
        for name in dict.fromkeys(main) if brief else self.columns:
            if name in frame and name not in self._hidden and (frame[name].notna().any() or name == self.first):
                own, metric = self.columns[name][0] in ("personal", IN_USE), others.get(name, self.metric)
                out[name] = [_text(row, name, own, metric) for _, row in frame.iterrows()]
            if name == IN_USE:
                out[MODEL] = frame[MODEL]
        if frame["diverged"].any():
            out["diverged"] = [f"{d:.0f} of {n:.0f}" for d, n in zip(frame["diverged"], frame["clients"], strict=True)]
        for name in ("steps",) if brief else WORK:
            if frame[name].notna().any():
                digits = 1 if name == "CPU s" else 0
                out[name] = ["" if pd.isna(v) else f"{v:,.{digits}f}" for v in frame[name]]
        out["MB up"] = [f"{v:.3g}" for v in frame["MB up"]]
        out["MB down"] = [f"{v:.3g}" for v in frame["MB down"]]
        out["s/round"] = ["" if pd.isna(v) else f"{v:.3f}" for v in frame["s/round"]]
        return out

    def intervals(self) -> pd.DataFrame:
        """Return 95 % bootstrap intervals, `low` and `high`, of the table's first column, one row per method.

        Each resample draws seeds, and within each drawn seed its clients. If there is one seed, only clients are
        drawn. A method without a readable last evaluation has none.
        """
        rows = {}
        for title in self.titles:
            values, seeds = [], []
            for run in (r for r in self.runs if r.title == title):
                try:
                    clients = run.clients()
                except CoterieError:  # damaged or missing, which a warning reports
                    continue
                column = clients.loc[~clients["newcomer"], f"{self.view or run.headline}/test"].dropna()
                values.append(column.to_numpy(float))
                seeds.append(np.full(len(column), run.settings["seed"]))
            low = high = np.nan
            if values and len(together := np.concatenate(values)):
                means = resampled(together[None], np.concatenate(seeds))
                low, high = np.quantile(means, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
            rows[title] = {"low": float(low), "high": float(high)}
        frame = pd.DataFrame(rows).T
        frame.index.name = "method"
        return frame

    def warnings(self) -> list[str]:
        """Return warnings for a reader of the numbers, one sentence each."""
        out = [w for r in self.runs for w in r.warnings()]
        if len(names := sorted({r.task.name for r in self.runs})) > 1:
            out.append(f"The runs are of several tasks ({', '.join(names)}): their numbers are not comparable.")
        seeds: dict[int, set[tuple[str, float]]] = {}
        for r in self.runs:
            # a validation part is taken from the training part, which changes the fingerprint but not the partition
            mark = r.description["partition"].get("sha256"), r.settings["federation"]["val_share"]
            seeds.setdefault(r.settings["seed"], set()).add(mark)
        if any(len(marks) > len({share for _, share in marks}) for marks in seeds.values()):
            where = f" of {self.runs[0].group}" if self.runs[0].group else ""
            out.append(
                f"The runs{where} do not share one partition of the same data: their numbers are not comparable."
            )
        return list(dict.fromkeys(out))

    def csv(self) -> str:
        """Return the numbers of `table` as CSV, accuracies as shares."""
        return str(self.table().to_csv())

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return markdown_table(self.readable())

    def latex(self, brief: bool = True) -> str:
        """Return the table as LaTeX (package booktabs).

        The best value of each column is bold. The first column has 95 % intervals (see `intervals`). `brief` leaves out
        further statistics of the first column, as in `readable`.
        """
        frame, shown, intervals = self.table(), self.readable(brief), self.intervals()
        bold = {(title, name) for name in shown.columns for title in self._best(frame, name)}
        for title, (low, high) in intervals.dropna().iterrows():
            shown.loc[title, self.first] += f" [{self.metric.text(low)}, {self.metric.text(high)}]"
        return latex_table(shown, bold)

    def _best(self, frame: pd.DataFrame, name: str) -> list[str]:
        """Return the methods with the best value of a column as it is shown; none if all have the same value."""
        if name not in self.columns or name == ATTACK:
            return []
        metric = next((m for m in self.metrics[1:] if name in (m.name, f"pooled {m.name}")), self.metric)
        if metric.name in self.added and metric not in NAMED_METRICS.values():
            return []  # a function of the user does not state in which direction it improves
        values = frame[name].dropna().astype(float)
        best = metric.text(values.min() if metric.lower != (name == "std") else values.max())
        titles = [str(title) for title, value in values.items() if metric.text(value) == best]
        return titles if len(titles) < len(values) else []

    def curves(self, view: str = "personal", part: str = "test", statistic: str = "mean") -> pd.DataFrame:
        """Return one column per method, mean over seeds, by evaluated round."""
        columns = {}
        for title in self.titles:
            curves = [r.curve(view, part, statistic) for r in self.runs if r.title == title]
            columns[title] = pd.concat(curves, axis=1).mean(axis=1)
        return pd.DataFrame(columns)


def _diverged(view: dict[str, Any], statistic: str) -> bool:
    """True if every model of the view diverged by the last evaluation, so that its statistics are meaningless."""
    return view["nonfinite"] == view["clients"] and statistic not in ("selected", "best")


def _text(row: pd.Series, name: str, personal: bool, metric: Metric) -> str:
    if pd.isna(row[name]):
        return "diverged" if row["diverged"] and personal else ""
    return metric.text(row[name]) + ("" if pd.isna(row[f"± {name}"]) else f" ± {metric.spread(row[f'± {name}'])}")
