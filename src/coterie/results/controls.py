"""Compare methods with their controls, paired by client and seed, from the folders of runs."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any, Literal

import numpy as np
import pandas as pd

from coterie.core.metrics import Metric
from coterie.core.tasks import Classification
from coterie.core.views import VIEWS
from coterie.errors import CoterieError, unknown
from coterie.methods import controls, method_names, registered_name
from coterie.results.bootstrap import RESAMPLES, Difference, paired_differences
from coterie.results.run import Run
from coterie.results.tables import latex_table, latex_text, markdown_table

# The controls of every method, with the views to show; "" is the requested view.
# FedAvg after local training is the same run as FedAvg, scored in the view "trained".
GENERAL: dict[str, tuple[str, ...]] = {
    "local": ("",),
    "fedavg": ("", "trained"),
    "fedavg-ft": ("adapted",),
    "fedper": ("",),
}
CONTROLS = "controls"  # name for the usual controls and those of the method
BUDGET = (
    "rounds",
    "epochs",
    "batch",
    "lr",
    "lr_decay",
    "lr_rounds",
    "lr_steps",
    "local_steps",
    "augment",
    "join",
    "model",
    "optimizer",
    "momentum",
    "weight_decay",
)
DIFFERENCE = "difference [95 %]"  # column of the tables
UNEQUAL = 0.1  # two rows whose training differs by more than this share are named in a warning
At = Literal["last", "selected"]


@dataclass(frozen=True)
class Row:
    """Runs of one title, one per seed, with the view that is scored."""

    title: str
    method: str  # name of the method in the settings
    view: str
    runs: dict[int, Run]  # by seed

    @property
    def label(self) -> str:
        """The title, with the view unless it is the personal one."""
        return self.title if self.view == "personal" else f"{self.title}, {self.view}"


@dataclass(frozen=True)
class Pair:
    """A method against one control, over the seeds they have in common."""

    row: Row
    against: Row
    mean: float  # mean of the method over seeds
    std: float  # standard deviation over seeds; NaN for one seed
    against_mean: float
    against_std: float
    difference: Difference

    @property
    def beats(self) -> bool:
        """True if the whole interval is above 0."""
        return self.difference.low > 0


class ControlTable:
    """The pairs of method and control in one group of runs, which have the same clients."""

    def __init__(
        self,
        runs: Sequence[Run],
        against: Sequence[str] = (),
        view: str = "",
        methods: Sequence[str] = (),
        at: At = "last",
        resamples: int = RESAMPLES,
    ):
        """Pair methods with controls.

        `methods` and their controls `against` are given by title or method (default: the controls that the methods
        name). `view` is the scored view (default: the headline of each run).
        """
        self.group = runs[0].group if runs else ""
        self.metric: Metric = runs[0].metric if runs else Classification.metrics[0]
        self.at: At = at
        self.view, self.resamples = headline_view(runs, view), resamples
        self._notes: list[str] = []
        self._read: dict[tuple[str, int], pd.DataFrame | None] = {}
        self.rows = self._rows(runs)
        self._against, self._methods = ([self._resolved(n) for n in names] for names in (against, methods))

    def _rows(self, runs: Sequence[Run]) -> list[Row]:
        by_title: dict[str, dict[int, Run]] = defaultdict(dict)
        for r in runs:
            seed = int(r.settings["seed"])
            if not any("evaluation" in e for e in r.events):
                self._notes.append(f"{r.path} has no evaluation yet and is left out")
            elif seed in by_title[r.title]:
                self._notes.append(f"{r.path} is a second run of {r.title} with seed {seed} and is left out")
            else:
                by_title[r.title][seed] = r
        return [
            Row(
                title,
                registered_name(str((first := next(iter(by.values()))).settings["method"])),
                self.view or first.headline,
                by,
            )
            for title, by in by_title.items()
            if by
        ]

    def _resolved(self, name: str) -> tuple[str, str]:
        """Return method (or title) and view for the name of a row, such as fedavg or fedavg/trained."""
        if name == CONTROLS:
            return name, ""
        names = {n for r in self.rows for n in (r.title, r.method)}
        name = name if name in names else registered_name(name)
        plain, _, view = name.rpartition("/") if name not in names else (name, "", "")
        plain = plain if plain in names else registered_name(plain)
        if plain not in names:
            raise unknown("method among these runs", plain or name, names)
        return plain, _view(view) if view else self.view

    # ---- pairs of method and control ---------------------------------------------------------------------------------
    def opponents(self) -> list[tuple[Row, list[Row]]]:
        """Return each method with its controls among the runs."""
        own = {r.title: _own(r) for r in self.rows}
        given = [n for n in self._against if n[0] != CONTROLS]
        if self._methods:
            chosen = self._named(self._methods)
        elif given:
            named = {r.title for r in self._named(given)}
            chosen = [r for r in self.rows if r.title not in named]
        else:
            all_controls = GENERAL.keys() | {c for r in self.rows for c in own[r.title] if c != r.method}
            chosen = [r for r in self.rows if r.method not in all_controls] or [
                r for r in self.rows if r.method != "local"
            ]
        out = []
        for row in map(self._with_view, chosen):
            usual = [(n, v or self.view) for n, views in GENERAL.items() for v in views]
            usual += [(n, self.view) for n in own[row.title]]
            names = [*(usual if not given or (CONTROLS, "") in self._against else []), *given]
            rivals = {r.label: r for r in map(self._with_view, self._named(names)) if r.label != row.label}
            others = [r for r in rivals.values() if r.title != row.title or _is_named(r, given)]
            first = {r.method: r.title for r in reversed(others)}
            out.append((row, [r for r in others if r.title == first[r.method] or not _compared_work(row, r)]))
        return out

    def _named(self, names: Iterable[tuple[str, str]]) -> list[Row]:
        """Return the rows of these names, in the order of the names."""
        return [
            replace(r, view=view or r.view) for name, view in names for r in self.rows if name in (r.title, r.method)
        ]

    def _with_view(self, row: Row) -> Row:
        """Return the row in its view, or in the personal view, with a note, if the method has no such model."""
        if _has(row, row.view):
            return row
        self._notes.append(f"{row.title} has no {row.view} model in every run: its personal model is shown")
        return replace(row, view="personal")

    # ---- numbers -----------------------------------------------------------------------------------------------------
    @cached_property
    def pairs(self) -> list[Pair]:
        """The pairs by method, then by control; pairs with the same clients share their resamples."""
        wanted: dict[tuple[Any, ...], list[tuple[Row, Row, pd.DataFrame]]] = defaultdict(list)
        order = [(row, rival) for row, rivals in self.opponents() for rival in rivals]
        for row, rival in order:
            both = self._paired(row, rival)
            if both is not None:
                wanted[tuple(both.index)].append((row, rival, both))
        pairs: dict[tuple[str, str], Pair] = {}
        for alike in wanted.values():
            seeds = alike[0][2].index.get_level_values("seed").to_numpy()
            gains = np.stack([gain_sign(self.metric) * (both["a"] - both["b"]).to_numpy() for _, _, both in alike])
            differences = paired_differences(gains, seeds, self.resamples)
            for (row, rival, both), d in zip(alike, differences, strict=True):
                means = both.groupby(level="seed").mean()
                spread = means.std(ddof=1)  # NaN for one seed
                pairs[row.label, rival.label] = Pair(
                    row, rival, float(means["a"].mean()), float(spread["a"]), float(means["b"].mean()),
                    float(spread["b"]), d,
                )  # fmt: skip
        return [pairs[a.label, b.label] for a, b in order if (a.label, b.label) in pairs]

    def _paired(self, row: Row, rival: Row) -> pd.DataFrame | None:
        """Return the scores a and b by (seed, client) that both rows have; None, with a note, if nothing is common."""
        seeds = sorted(row.runs.keys() & rival.runs.keys())
        frames = {}
        for seed in seeds:
            for r in (row, rival):
                if (r.label, seed) not in self._read:
                    self._read[r.label, seed] = self._values(r, seed)
            a, b = self._read[row.label, seed], self._read[rival.label, seed]
            if a is None or b is None:
                continue
            both = pd.concat({"a": a["value"], "b": b["value"]}, axis=1, join="inner")
            if not a["samples"].reindex(both.index).equals(b["samples"].reindex(both.index)):
                paths = f"{row.runs[seed].path} and {rival.runs[seed].path}"
                self._notes.append(f"{paths} are not paired: the test parts of their clients differ")
                continue
            frames[seed] = both
        if not frames:
            self._notes.append(f"{row.label} and {rival.label} have no seed with the same clients")
            return None
        if len(frames) < max(len(row.runs), len(rival.runs)):
            self._notes.append(f"{row.label} and {rival.label} are paired on {_count(len(frames), 'common seed')}")
        return pd.concat(frames, names=["seed", "client"])

    def _values(self, row: Row, seed: int) -> pd.DataFrame | None:
        """Return score and test samples by client, without newcomers.

        None, with a note, if every model diverged or the file is damaged.
        """
        run = row.runs[seed]
        round = None
        if self.at == "selected":
            round = run.summary().get(row.view, {}).get("selected_round")
            if round is None:
                raise CoterieError(f"{run.path} has no validation part for {row.view}, so no round can be selected")
        try:
            z = run.evaluation(round)
        except CoterieError as e:  # damaged
            self._notes.append(f"{e}; it is left out")
            return None
        part = f"{row.view}/test/"
        counts = {k.removeprefix(part): v for k, v in z.items() if k.startswith(part)}
        samples, values = run.task.samples(counts), run.task.measured(counts)[run.metric.name]
        kept = ~z["newcomer"] & (samples > 0)
        if not np.isfinite(z[f"{row.view}/test/loss"][kept]).any():
            self._notes.append(f"{row.label}, seed {seed}: every model diverged, so it is left out")
            return None
        return pd.DataFrame({"value": values[kept], "samples": samples[kept]}, index=z["clients"][kept]).dropna()

    def warnings(self) -> list[str]:
        """Return notes for a reader of the numbers, one sentence each."""
        _ = self.pairs
        shown = {id(r): r for p in self.pairs for row in (p.row, p.against) for r in row.runs.values()}.values()
        rounds = sorted({r.last_round for r in shown})
        notes = [*self._notes]
        unequal: dict[str, list[str]] = defaultdict(list)
        for p in self.pairs:
            a, b = (next(iter(row.runs.values())).settings for row in (p.row, p.against))
            known = "samples" in mean_work(p.row) and "samples" in mean_work(p.against)
            counted = ("rounds", "join") if known else ()  # the work says what they amount to
            if other := [k for k in BUDGET if a.get(k) != b.get(k) and k not in counted]:
                notes.append(f"{p.row.label} and {p.against.label} were trained with different {', '.join(other)}")
            if text := _compared_work(p.row, p.against):
                unequal[text].append(p.against.label)
        notes += [text.format(", ".join(names)) for text, names in unequal.items()]
        if len(rounds) > 1 and not all("samples" in r.work() for r in shown):
            notes.append(f"the runs end after different rounds: {', '.join(map(str, rounds))}")
        notes += [f"{r.path} is at round {r.last_round} of {r.settings['rounds']}" for r in shown if not r.finished]
        return list(dict.fromkeys(notes))

    # ---- for readers -------------------------------------------------------------------------------------------------
    def frame(self) -> pd.DataFrame:
        """Return one row per pair; accuracies are shares, and a positive difference is always a gain."""
        return pd.DataFrame([_plain(p, self.group) for p in self.pairs])

    def readable(self) -> dict[str, pd.DataFrame]:
        """Return heading -> table, one for each method; accuracies in percent, their differences in points.

        A positive difference is a gain, also where a lower metric is better.
        """
        out = {}
        for row in self._labels:
            mine = [p for p in self.pairs if p.row.label == row]
            differences = [p.difference for p in mine]
            most = max(mine, key=lambda p: p.difference.seeds)
            head = f"{row}: {value_text(self.metric, most.mean, most.std)} ({heading(most)})"
            out[head] = pd.DataFrame(
                {
                    self.metric.name: [value_text(self.metric, p.against_mean, p.against_std) for p in mine],
                    DIFFERENCE: [
                        "{} [{}, {}]".format(*(signed_text(self.metric, v) for v in (d.mean, d.low, d.high)))
                        for d in differences
                    ],
                    "gain": [str(d.gain) for d in differences],
                    "lose": [str(d.lose) for d in differences],
                    "tie": [str(d.tie) for d in differences],
                },
                index=pd.Index([p.against.label for p in mine], name="against"),
            )
        return out

    def covers(self) -> str:
        """Return the scope of the intervals in words."""
        if any(p.difference.seeds == 1 for p in self.pairs):
            return "with one seed, an interval covers clients only; different seeds may differ by more"
        return "intervals cover seeds and clients"

    def csv(self) -> str:
        """Return the numbers of `frame` as CSV."""
        return str(self.frame().to_csv(index=False))

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        return "\n".join(f"{head}\n\n{markdown_table(table)}" for head, table in self.readable().items())

    def latex(self) -> str:
        """Return the tables as LaTeX (package booktabs); a difference whose interval excludes 0 is bold."""
        out = []
        for (head, table), row in zip(self.readable().items(), self._labels, strict=True):
            sure = [p.against.label for p in self.pairs if p.row.label == row and p.difference.excludes_zero]
            out.append(f"{latex_text(head)}\n\n{latex_table(table, [(name, DIFFERENCE) for name in sure])}")
        return "\n".join(out)

    @property
    def _labels(self) -> list[str]:
        """Labels of the methods, each of which has a table."""
        return list(dict.fromkeys(p.row.label for p in self.pairs))

    def __repr__(self) -> str:
        return "\n".join(f"{head}\n{table.to_string()}" for head, table in self.readable().items())

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(head)}</p>{table.to_html()}" for head, table in self.readable().items())


def control_tables(
    runs: Sequence[Run],
    against: Sequence[str] = (),
    view: str = "",
    methods: Sequence[str] = (),
    at: At = "last",
    resamples: int = RESAMPLES,
) -> list[ControlTable]:
    """Return a table for each group of runs with the same clients; groups without the named methods are left out."""
    out = []
    problem: CoterieError | None = None
    for group in dict.fromkeys(r.group for r in runs):
        try:
            out.append(ControlTable([r for r in runs if r.group == group], against, view, methods, at, resamples))
        except CoterieError as e:
            problem = e
    if not out and problem is not None:
        raise problem
    return out


def heading(pair: Pair) -> str:
    """Return the number of seeds and clients of a pair as text."""
    d = pair.difference
    return f"{_count(d.seeds, 'seed')}, {_count(d.clients, 'client')}" + (" in all" if d.seeds > 1 else "")


def _count(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def headline_view(runs: Sequence[Run], view: str = "") -> str:
    """Return the requested view, otherwise the common headline of these runs; empty if their headlines differ."""
    headlines = {r.headline for r in runs}
    return _view(view) if view else headlines.pop() if len(headlines) == 1 else ""


def _own(row: Row) -> tuple[str, ...]:
    """Return the controls that the method of these runs names."""
    if row.method in method_names():
        return controls(row.method)
    given = next(iter(row.runs.values())).objects.method
    return controls(given) if given is not None else ()


def _is_named(row: Row, names: Iterable[tuple[str, str]]) -> bool:
    return any(name in (row.title, row.method) and view in ("", row.view) for name, view in names)


def _view(name: str) -> str:
    if name not in VIEWS:
        raise unknown("statistic", name, VIEWS)
    return name


def _has(row: Row, view: str) -> bool:
    """True if every run scored this view in its last evaluation."""
    return all(f"{view}/test" in _views(r) for r in row.runs.values())


def _views(run: Run) -> set[str]:
    return next((set(e["eval"]) for e in reversed(run.events) if e["eval"]), set())


def mean_work(row: Row) -> dict[str, float]:
    """Return the local training behind a row, as means over its seeds; numbers that a run lacks are missing."""
    frame = pd.DataFrame([r.work(row.view) for r in row.runs.values()])
    return {str(k): float(v) for k, v in frame.dropna(axis=1).mean().items()}


def _compared_work(row: Row, against: Row) -> str:
    """Return how much a row trained, if that differs by more than a tenth from the other row; otherwise ""."""
    a, b = mean_work(row), mean_work(against)
    key = "samples" if "samples" in a and "samples" in b else "steps"
    if key not in a or key not in b or abs(a[key] - b[key]) <= UNEQUAL * b[key]:
        return ""
    often = f"trained {a[key] / b[key]:.2g} times as much as" if b[key] else "trained, which is not so for"
    return f"{row.label} {often} {{}} ({a['steps']:,.0f} and {b['steps']:,.0f} local steps)"


def _plain(p: Pair, group: str) -> dict[str, Any]:
    d = p.difference
    return {
        "group": group, "method": p.row.title, "score": p.row.view, "against": p.against.title,
        "against_score": p.against.view, "seeds": d.seeds, "clients": d.clients, "mean": p.mean, "std": p.std,
        "against_mean": p.against_mean, "against_std": p.against_std, "difference": d.mean, "low": d.low,
        "high": d.high, "gain": d.gain, "lose": d.lose, "tie": d.tie, "covers": d.covers,
    }  # fmt: skip


def gain_sign(metric: Metric) -> int:
    """Return the factor that makes a gain positive."""
    return -1 if metric.lower else 1


def gain_unit(metric: Metric) -> str:
    """Return the unit of a difference: points for percentages."""
    return "points" if metric.percent else metric.name


def signed_text(metric: Metric, difference: float) -> str:
    """Return a signed difference as text, of accuracies in points."""
    digits = 1 if metric.percent else 4
    return f"{round(metric.scale * difference, digits) + 0.0:+.{digits}f}"  # no -0.0


def value_text(metric: Metric, mean: float, std: float) -> str:
    """Return a value and its standard deviation, if it has one, as text."""
    return metric.text(mean) + ("" if np.isnan(std) else f" ± {metric.spread(std)}")
