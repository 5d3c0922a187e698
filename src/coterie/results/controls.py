"""Methods against their controls: the rows a claim must beat, paired by client and seed, from runs that have ended."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd

from coterie.core.tasks import Classification, Metric
from coterie.errors import CoterieError, unknown
from coterie.methods import canonical, controls, known
from coterie.results.bootstrap import RESAMPLES, Difference, paired_differences
from coterie.results.run import Run
from coterie.results.statistics import VIEWS
from coterie.results.tables import markdown_table

# What every method must beat, and the views its rows show beside (or, without "", instead of) the one asked for.
# FedAvg after local training is no second run: it is the same one, scored after local training.
GENERAL: dict[str, tuple[str, ...]] = {
    "local": ("",),
    "fedavg": ("", "trained"),
    "fedavg-ft": ("adapted",),
    "fedper": ("",),
}
CONTROLS = "controls"  # stands for the usual controls and those that a method names
BUDGET = ("rounds", "epochs", "batch", "lr", "lr_decay", "join", "model", "optimizer", "momentum", "weight_decay")
At = Literal["last", "selected"]


@dataclass(frozen=True)
class Row:
    """Runs of one title, one per seed, with the view that is scored."""

    title: str
    method: str  # as the settings name it
    view: str
    runs: dict[int, Run]  # by seed

    @property
    def label(self) -> str:
        """The statistic stands beside the name unless it is the plain one."""
        return self.title if self.view == "personal" else f"{self.title}, {self.view}"


@dataclass(frozen=True)
class Pair:
    """A method against one control, over the seeds they have in common."""

    row: Row
    against: Row
    mean: float  # of the method, over seeds
    std: float  # standard deviation over seeds; NaN of one seed
    against_mean: float
    against_std: float
    difference: Difference

    @property
    def beats(self) -> bool:
        """Is the whole interval above 0?"""
        return self.difference.low > 0


class ControlTable:
    """The pairs of one group of runs that have the same clients."""

    def __init__(
        self,
        runs: Sequence[Run],
        against: Sequence[str] = (),
        view: str = "",
        methods: Sequence[str] = (),
        at: At = "last",
        resamples: int = RESAMPLES,
    ):
        """`against` names controls, and `methods` what is held against them, by title or method; empty: those that
        the methods themselves name. `view`: what is scored; empty: the headline of the runs.
        """
        self.group = runs[0].group if runs else ""
        self.metric: Metric = runs[0].metric if runs else Classification.metrics[0]
        self.at: At = at
        self.view, self.resamples = headline_view(runs, view), resamples
        self._said: list[str] = []
        self._read: dict[tuple[str, int], pd.DataFrame | None] = {}
        self.rows = self._titles(runs)
        self._against, self._methods = ([self._resolved(n) for n in names] for names in (against, methods))

    def _titles(self, runs: Sequence[Run]) -> list[Row]:
        found: dict[str, dict[int, Run]] = defaultdict(dict)
        for r in runs:
            seed = int(r.settings["seed"])
            if not any("evaluation" in e for e in r.events):
                self._said.append(f"{r.path} has no evaluation yet and is left out")
            elif seed in found[r.title]:
                self._said.append(f"{r.path} is a second run of {r.title} with seed {seed} and is left out")
            else:
                found[r.title][seed] = r
        return [
            Row(title, canonical(str(next(iter(by.values())).settings["method"])), self.view, by)
            for title, by in found.items()
            if by
        ]

    def _resolved(self, name: str) -> tuple[str, str]:
        """What a user calls a row: a title or a method, and perhaps a view, as in fedavg/trained."""
        if name == CONTROLS:
            return name, ""
        names = {n for r in self.rows for n in (r.title, r.method)}
        name = name if name in names else canonical(name)
        plain, _, view = name.rpartition("/") if name not in names else (name, "", "")
        plain = plain if plain in names else canonical(plain)
        if plain not in names:
            raise unknown("method among these runs", plain or name, names)
        return plain, _view(view or self.view)

    # ---- who meets whom ----------------------------------------------------------------------------------------------
    def opponents(self) -> list[tuple[Row, list[Row]]]:
        """Each method with its controls among the runs."""
        own = {r.title: _own(r) for r in self.rows}
        given = [n for n in self._against if n[0] != CONTROLS]
        if self._methods:
            chosen = self._named(self._methods)
        elif given:
            named = {r.title for r in self._named(given)}
            chosen = [r for r in self.rows if r.title not in named]
        else:
            theirs = GENERAL.keys() | {c for r in self.rows for c in own[r.title] if c != r.method}
            chosen = [r for r in self.rows if r.method not in theirs] or [r for r in self.rows if r.method != "local"]
        out = []
        for row in map(self._seen, chosen):
            usual = [(n, v or self.view) for n, views in GENERAL.items() for v in views]
            usual += [(n, self.view) for n in own[row.title]]
            names = [*(usual if not given or (CONTROLS, "") in self._against else []), *given]
            rivals = {r.label: r for r in map(self._seen, self._named(names)) if r.label != row.label}
            out.append((row, [r for r in rivals.values() if r.title != row.title or _is_named(r, given)]))
        return out

    def _named(self, names: Iterable[tuple[str, str]]) -> list[Row]:
        """In the order of the names."""
        return [replace(r, view=view) for name, view in names for r in self.rows if name in (r.title, r.method)]

    def _seen(self, row: Row) -> Row:
        """In the view that is asked for; in the personal one, with a word, where a method has no such model."""
        if _has(row, row.view):
            return row
        self._said.append(f"{row.title} has no {row.view} model in every run: its personal one is shown")
        return replace(row, view="personal")

    # ---- numbers -----------------------------------------------------------------------------------------------------
    @cached_property
    def pairs(self) -> list[Pair]:
        """In the order of the methods, then of the controls; those that share clients are resampled together."""
        wanted: dict[tuple[Any, ...], list[tuple[Row, Row, pd.DataFrame]]] = defaultdict(list)
        order = [(row, rival) for row, rivals in self.opponents() for rival in rivals]
        for row, rival in order:
            both = self._paired(row, rival)
            if both is not None:
                wanted[tuple(both.index)].append((row, rival, both))
        found: dict[tuple[str, str], Pair] = {}
        for alike in wanted.values():
            seeds = alike[0][2].index.get_level_values("seed").to_numpy()
            gains = np.stack([gain_sign(self.metric) * (both["a"] - both["b"]).to_numpy() for _, _, both in alike])
            differences = paired_differences(gains, seeds, self.resamples)
            for (row, rival, both), d in zip(alike, differences, strict=True):
                means = both.groupby(level="seed").mean()
                spread = means.std(ddof=1)  # NaN of one seed
                found[row.label, rival.label] = Pair(
                    row, rival, float(means["a"].mean()), float(spread["a"]), float(means["b"].mean()),
                    float(spread["b"]), d,
                )  # fmt: skip
        return [found[a.label, b.label] for a, b in order if (a.label, b.label) in found]

    def _paired(self, row: Row, rival: Row) -> pd.DataFrame | None:
        """Scores a and b by (seed, client), where both have them; None (and a sentence) if nothing is left."""
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
                self._said.append(f"{paths} are not paired: the test parts of their clients differ")
                continue
            frames[seed] = both
        if not frames:
            self._said.append(f"{row.label} and {rival.label} have no seed with the same clients in common")
            return None
        if len(frames) < max(len(row.runs), len(rival.runs)):
            self._said.append(f"{row.label} and {rival.label} are paired on {_many(len(frames), 'common seed')}")
        return pd.concat(frames, names=["seed", "client"])

    def _values(self, row: Row, seed: int) -> pd.DataFrame | None:
        """Score and test samples by client, without newcomers; None (and a sentence) if every model diverged, or the
        file is damaged.
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
            self._said.append(f"{e}; it is left out")
            return None
        part = f"{row.view}/test/"
        counts = {k.removeprefix(part): v for k, v in z.items() if k.startswith(part)}
        samples, values = run.task.samples(counts), run.task.measured(counts)[run.metric.name]
        kept = ~z["newcomer"] & (samples > 0)
        if not np.isfinite(z[f"{row.view}/test/loss"][kept]).any():
            self._said.append(f"{row.label}, seed {seed}: every model diverged, so it is left out")
            return None
        return pd.DataFrame({"value": values[kept], "samples": samples[kept]}, index=z["clients"][kept]).dropna()

    def warnings(self) -> list[str]:
        """A sentence for each thing that a reader of the numbers must know."""
        _ = self.pairs
        shown = {id(r): r for p in self.pairs for row in (p.row, p.against) for r in row.runs.values()}.values()
        rounds = sorted({r.last_round for r in shown})
        said = [*self._said]
        for p in self.pairs:
            a, b = (next(iter(row.runs.values())).settings for row in (p.row, p.against))
            if other := [k for k in BUDGET if a.get(k) != b.get(k)]:
                said.append(f"{p.row.label} and {p.against.label} were trained with different {', '.join(other)}")
        if len(rounds) > 1:
            said.append(f"the runs end after different rounds: {', '.join(map(str, rounds))}")
        said += [f"{r.path} stands at round {r.last_round} of {r.settings['rounds']}" for r in shown if not r.finished]
        return list(dict.fromkeys(said))

    # ---- for readers -------------------------------------------------------------------------------------------------
    def frame(self) -> pd.DataFrame:
        """One row per pair; accuracies are shares, and a positive difference is a gain also where lower is better."""
        return pd.DataFrame([_plain(p, self.group) for p in self.pairs])

    def readable(self) -> dict[str, pd.DataFrame]:
        """A small table for each method, headed by its score; accuracies in percent, their differences in
        points. A positive difference is a gain also where lower is better.
        """
        out = {}
        for row in dict.fromkeys(p.row.label for p in self.pairs):
            mine = [p for p in self.pairs if p.row.label == row]
            found = [p.difference for p in mine]
            most = max(mine, key=lambda p: p.difference.seeds)
            head = f"{row}: {value_text(self.metric, most.mean, most.std)} ({heading(most)})"
            out[head] = pd.DataFrame(
                {
                    self.metric.name: [value_text(self.metric, p.against_mean, p.against_std) for p in mine],
                    "difference [95 %]": [
                        "{} [{}, {}]".format(*(signed_text(self.metric, v) for v in (d.mean, d.low, d.high)))
                        for d in found
                    ],
                    "gain": [str(d.gain) for d in found],
                    "lose": [str(d.lose) for d in found],
                    "tie": [str(d.tie) for d in found],
                },
                index=pd.Index([p.against.label for p in mine], name="against"),
            )
        return out

    def covers(self) -> str:
        """One sentence on what the intervals cover."""
        if any(p.difference.seeds == 1 for p in self.pairs):
            return "with one seed an interval covers clients only; other seeds may differ by more"
        return "intervals cover seeds and clients"

    def markdown(self) -> str:
        """The tables as Markdown."""
        return "\n".join(f"{head}\n\n{markdown_table(table)}" for head, table in self.readable().items())


def control_tables(
    runs: Sequence[Run],
    against: Sequence[str] = (),
    view: str = "",
    methods: Sequence[str] = (),
    at: At = "last",
    resamples: int = RESAMPLES,
) -> list[ControlTable]:
    """One for each group of runs that share their clients. A group without the methods that are named is left out."""
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
    """How many seeds and clients a row is about."""
    d = pair.difference
    return f"{_many(d.seeds, 'seed')}, {_many(d.clients, 'client')}" + (" in all" if d.seeds > 1 else "")


def _many(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def headline_view(runs: Sequence[Run], view: str = "") -> str:
    """The view that is asked for, or else the one that all of these runs lead with, or else the personal models."""
    found = {r.headline for r in runs}
    return _view(view or (found.pop() if len(found) == 1 else "personal"))


def _own(row: Row) -> tuple[str, ...]:
    """The controls that the method of these runs names."""
    if row.method in known():
        return controls(row.method)
    given = next(iter(row.runs.values())).objects.method
    return controls(given) if given is not None else ()


def _is_named(row: Row, names: Iterable[tuple[str, str]]) -> bool:
    return any(name in (row.title, row.method) and view == row.view for name, view in names)


def _view(name: str) -> str:
    if name not in VIEWS:
        raise unknown("statistic", name, VIEWS)
    return name


def _has(row: Row, view: str) -> bool:
    """Has every run scored this view in its last evaluation?"""
    return all(f"{view}/test" in _views(r) for r in row.runs.values())


def _views(run: Run) -> set[str]:
    return next((set(e["eval"]) for e in reversed(run.events) if e["eval"]), set())


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
    """A difference, signed; of accuracies in points."""
    digits = 1 if metric.percent else 4
    return f"{round(metric.scale * difference, digits) + 0.0:+.{digits}f}"  # no -0.0


def value_text(metric: Metric, mean: float, std: float) -> str:
    """A value and its standard deviation, if there is one."""
    return metric.text(mean) + ("" if np.isnan(std) else f" ± {metric.spread(std)}")
