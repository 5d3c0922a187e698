"""Choose settings and methods on validation data by successive halving (Jamieson, Talwalkar, AISTATS 2016).

Every trial is a run. All trials train a few rounds; the best third continues to three times as many rounds, and so on.
A promoted trial continues its own run and gives the same bits as a run without a pause, so no round is computed twice
and a killed search continues from the rounds it has. Test data decide nothing.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from coterie.config import Engine, RunSettings, given_reading, method_class, owner, settings
from coterie.core.method import Method
from coterie.core.rng import numpy_rng
from coterie.data.settings import PartitionSettings
from coterie.data.sources import load_dataset
from coterie.engine.personal_models import initial_values
from coterie.engine.session import Objects, prepare
from coterie.errors import CoterieError, unknown
from coterie.methods import fields
from coterie.results.command_line import run_command
from coterie.results.grid import Cell, SweepStatus, sweep
from coterie.results.run import Run
from coterie.storage.atomic import write_atomic

Sampler = Literal["grid", "random", "optuna"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
_GENERATION = 4  # trials that Optuna proposes at a time; a constant, so that proposals do not depend on workers
_MOST_COMBINATIONS = 100_000
_SHARED = ("rounds", "method", "seed", "data", "eval_every", "checkpoint_every", "final_trained", "watch", "stop_after",
           "stop_at")  # fmt: skip
_OF_TRIALS = ("eval_every", "checkpoint_every", "final_trained", "watch")  # settings that the search decides


@dataclass(frozen=True)
class Trial:
    """One combination of settings."""

    number: int
    method: str
    chosen: Mapping[str, Any]  # values of the settings that are searched
    cell: Cell

    @property
    def name(self) -> str:
        return ", ".join([self.method, *(f"{k}={v}" for k, v in self.chosen.items())])

    def run(self) -> Run:
        """Return the trial's run."""
        return Run(self.cell.out, objects=self.cell.objects)


@dataclass(frozen=True)
class SearchPlan:
    """The number of trials that train up to each of the listed rounds."""

    rounds: tuple[int, ...]
    trials: tuple[int, ...]

    @staticmethod
    def of(trials: int, rounds: int, eta: int) -> "SearchPlan":
        steps = 0
        while eta ** (steps + 1) <= min(trials, rounds):
            steps += 1
        first = max(1, rounds // eta**steps)
        at = [first * eta**i for i in range(steps)] + [rounds]
        return SearchPlan(tuple(at), tuple(max(1, trials // eta**i) for i in range(steps + 1)))

    @property
    def cost(self) -> int:
        """The rounds of all trials together."""
        before = (0, *self.rounds)
        return sum(n * (t - s) for n, t, s in zip(self.trials, self.rounds, before, strict=False))


@dataclass(frozen=True)
class Budget:
    """The limits of a search."""

    eta: int = 3
    rounds: int | None = None  # rounds of all trials together
    minutes: float | None = None
    trials: int | None = None  # largest number of combinations

    def __post_init__(self) -> None:
        if self.eta < 2:
            raise CoterieError(f"eta = {self.eta} is invalid: it must be at least 2 (one of every eta is promoted)")
        for k in ("rounds", "minutes", "trials"):
            if (v := getattr(self, k)) is not None and v <= 0:
                raise CoterieError(f"{'budget' if k == 'rounds' else k} = {v} is invalid: it must be above 0")

    def fits(self, trials: int, rounds: int) -> int:
        """Return the number of trials that the budget allows."""
        n = min(trials, self.trials or trials)
        while n > 0 and self.rounds is not None and SearchPlan.of(n, rounds, self.eta).cost > self.rounds:
            n -= 1
        if n == 0:
            raise CoterieError(f"budget = {self.rounds} is less than the {rounds} rounds of one trial; lower rounds")
        return n


@dataclass
class Tuning:
    """The result of a search. `best` stays None until a trial has been scored."""

    folder: Path
    trials: list[Trial]
    plan: SearchPlan
    values: dict[int, dict[int, float]] = field(default_factory=dict)  # trial -> round -> value on validation data
    failed: dict[int, str] = field(default_factory=dict)  # trial -> reason
    complete: bool = False

    @property
    def metric(self) -> Any:
        """The metric of the values; None until a trial has been scored."""
        return next((self.trials[i].run().metric for i in self.values), None)

    def ranked(self, among: Iterable[int], at: int) -> list[int]:
        """Return trials from best to worst by their value at this round; equal ones by their number."""
        lower = self.metric is not None and self.metric.lower

        def key(i: int) -> tuple[float, int]:
            value = self.values.get(i, {}).get(at, math.nan)
            return (math.inf if math.isnan(value) else value if lower else -value), i

        return sorted(among, key=key)

    @property
    def best(self) -> Trial | None:
        """The best of the trials that trained the most rounds."""
        trained = {i: max(v) for i, v in self.values.items() if v}
        if not trained:
            return None
        most = max(trained.values())
        return self.trials[self.ranked([i for i, t in trained.items() if t == most], most)[0]]

    @property
    def spent(self) -> int:
        """The rounds that were trained."""
        return sum(max(v, default=0) for v in self.values.values())

    @property
    def whole(self) -> int:
        """The rounds of a full grid."""
        return len(self.trials) * self.plan.rounds[-1]

    def frame(self) -> pd.DataFrame:
        """Return one row per trial, best first: settings, rounds trained, value on validation data at each step."""
        searched = dict.fromkeys(k for t in self.trials for k in t.chosen)  # methods may have different settings
        rows = []
        for t in self.trials:
            values = self.values.get(t.number, {})
            rows.append({
                "trial": t.number, "method": t.method, **{k: t.chosen.get(k) for k in searched},
                "rounds": max(values, default=0),
                **{f"round {r}": values.get(r, math.nan) for r in self.plan.rounds},
            })  # fmt: skip
        order: list[int] = []
        for r in reversed(self.plan.rounds):
            order += [i for i in self.ranked((i for i, v in self.values.items() if r in v), r) if i not in order]
        order += [t.number for t in self.trials if t.number not in order]
        return pd.DataFrame(rows).set_index("trial").loc[order]

    def command(self) -> str:
        """Return the command line of the winner."""
        if self.best is None:
            return ""
        return run_command(self.best.cell.settings.model_dump(mode="json"), leave_out=_OF_TRIALS)

    def run(self) -> Run:
        """Return the winner's run."""
        if self.best is None:
            raise CoterieError("no trial has been scored yet")
        return self.best.run()

    def write(self) -> None:
        """Write table.csv and, once a trial has been scored, best.json and the figure."""
        write_atomic(self.folder / "table.csv", self.frame().to_csv().encode())
        if self.best is not None:
            best = {"trial": self.best.number, "method": self.best.method, "settings": dict(self.best.chosen)}
            best |= {"command": self.command(), "rounds": self.spent, "full_grid": self.whole}
            write_atomic(self.folder / "best.json", json.dumps(best, indent=1).encode())
            self._draw(self.best, self.folder / "tune.png")

    def _draw(self, best: Trial, path: Path) -> None:
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes, metric = figure.add_subplot(), self.metric
        for i, values in self.values.items():
            at, y = zip(*sorted(values.items()), strict=True)
            look: dict[str, Any] = {"lw": 0.8, "color": "0.6", "zorder": 1}
            if i == best.number:
                look = {"lw": 2, "color": "C0", "zorder": 2, "label": best.name}
            axes.plot(at, [metric.scale * v for v in y], marker="o", ms=4, **look)
        axes.set_xscale("log")
        axes.set_xticks(self.plan.rounds, [str(r) for r in self.plan.rounds])
        axes.minorticks_off()
        axes.set_xlabel("round")
        axes.set_ylabel(f"{metric.label}, validation part")
        axes.legend(fontsize=8)
        figure.savefig(path, dpi=150)


def make_trials(
    methods: Sequence[str | type[Method]],
    space: Mapping[str, Sequence[Any]],
    folder: Path,
    objects: Objects,
    rounds: int,
    budget: Budget,
    **fixed: Any,
) -> list[Trial]:
    """Return every combination of the searched settings, for each method those that it has.

    Settings of the run and the federation apply to all methods, other settings to the methods that have them, and
    `method.setting` to that method alone.
    """
    if not methods:
        raise CoterieError("name at least one method to tune")
    names = [m if isinstance(m, str) else m.__name__ for m in methods if method_class(m)]
    own = {n: fields(m, given_reading(fixed, n)) for n, m in zip(names, methods, strict=True)}
    if len(own) < len(methods):
        raise CoterieError(f"a method is named twice: {', '.join(names)}")
    _check_names(space, fixed, own)
    count = sum(math.prod(len(v) for k, v in space.items() if _has(k, n, own[n])) for n in names)
    if count > _MOST_COMBINATIONS:
        raise CoterieError(f"there are {count} combinations, more than {_MOST_COMBINATIONS}; give fewer values")
    first = SearchPlan.of(budget.fits(count, rounds), rounds, budget.eta).rounds[0]  # later steps are multiples
    defaults = {"final_trained": False, "watch": False}
    every = {"eval_every": first, "checkpoint_every": first, "rounds": rounds}
    trials: list[Trial] = []
    for name, method in zip(names, methods, strict=True):
        searched, other = (
            {k.removeprefix(f"{name}."): v for k, v in given.items() if _has(k, name, own[name])}
            for given in (space, fixed)
        )
        its_objects = replace(objects, method=None if isinstance(method, str) else method)
        for values in product(*searched.values()):
            chosen = dict(zip(searched, values, strict=True))
            made = settings(**{**defaults, **other, **chosen, **every, "method": method})
            number = len(trials)
            trials.append(Trial(number, name, chosen, Cell(made, folder / f"{number:04d}-{name}", its_objects)))
    return trials


def _check_names(
    space: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any], own: Mapping[str, Collection[str]]
) -> None:
    """Raise CoterieError if a setting is unknown, cannot be searched, or has no list of different values."""
    if not isinstance(space, Mapping):
        raise CoterieError(f"space = {space!r} is invalid: it must be a table of lists, such as {{'lr': [0.01, 0.1]}}")
    for k in (*space, *fixed):
        method, dot, setting = k.rpartition(".")
        if dot and method not in own:
            raise unknown("method in the setting", method, own)
        if k not in ("settings", "federation"):
            owner(setting, *([own[method]] if dot else own.values()))
    for k, values in space.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise CoterieError(f"{k} = {values!r} is invalid: a setting that is searched has a list of values")
        if k.rpartition(".")[2] in _SHARED:
            raise CoterieError(f"{k} cannot be searched: it is the same for all trials")
        if twice := [v for i, v in enumerate(values) if v in values[:i]]:
            raise CoterieError(f"{k} has the value {twice[0]!r} twice")
    for k, v in fixed.items():
        if (name := k.rpartition(".")[2]) in ("stop_after", "stop_at") and v is not None:
            raise CoterieError(f"{name} cannot be set: the search decides which trials end early")


def _has(setting: str, name: str, own: Collection[str]) -> bool:
    """True if the setting applies to the method of this name, which has `own` settings."""
    method, dot, plain = setting.rpartition(".")
    if dot:
        return method == name
    shared = {"settings", "federation", *RunSettings.model_fields, *PartitionSettings.model_fields}
    return plain in shared or plain in own


def search(
    trials: Sequence[Trial],
    folder: Path,
    engine: Engine,
    budget: Budget,
    sampler: Sampler = "grid",
    seed: int = 0,
    tell: Callable[[SweepStatus], object] = lambda s: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Tuning:
    """Run successive halving over the trials, or continue an unfinished search in the same folder."""
    if sampler not in SAMPLERS:
        raise unknown("sampler", sampler, SAMPLERS)
    rounds = trials[0].cell.settings.rounds
    n = budget.fits(len(trials), rounds)
    if (folder / "settings.json").exists():
        raise CoterieError(f"{folder} is the folder of a run; choose a different folder for the search")
    deadline = math.inf if budget.minutes is None else time.monotonic() + 60 * budget.minutes
    _check_trials(trials, engine)
    tuning = Tuning(folder, list(trials), SearchPlan.of(n, rounds, budget.eta))

    def over() -> bool:
        return stopped() or time.monotonic() > deadline

    def advance(numbers: Sequence[int], to: int) -> bool:
        """Train these trials to a round; return False if time ran out before all of them were there."""
        cells = {i: replace(trials[i].cell, until=to) for i in numbers}
        status = sweep(list(cells.values()), engine, tell, over)
        for i, cell in cells.items():
            if cell.out in status.failed:
                tuning.failed[i] = status.failed[cell.out]
            elif cell.finished():
                tuning.values.setdefault(i, {})[to] = _validation_value(trials[i].run(), to)
        return not over() or all(i in tuning.failed or to in tuning.values.get(i, {}) for i in numbers)

    if sampler == "optuna":
        alive = _proposed(tuning, n, advance, seed)
    elif n < len(trials):  # a grid that exceeds the budget is sampled too
        alive = sorted(numpy_rng(seed, "tune").permutation(len(trials))[:n].tolist())
    else:
        alive = list(range(len(trials)))
    before = None
    for to, count in zip(tuning.plan.rounds, tuning.plan.trials, strict=True):
        if before is not None:
            alive = tuning.ranked([i for i in alive if i not in tuning.failed], before)[:count]
        if not advance(alive, to):
            break
        before = to
    else:
        tuning.complete = True
    if not tuning.values and tuning.failed:
        raise CoterieError(f"every trial failed: {next(iter(tuning.failed.values()))}")
    tuning.write()
    return tuning


def _proposed(tuning: Tuning, n: int, advance: Callable[[Sequence[int], int], bool], seed: int) -> list[int]:
    """Return trials that Optuna's sampler proposes, a few at a time, and train them to the first step of the plan.

    Proposals depend on the seed and the values only, so a killed search repeats them.
    """
    try:
        import optuna
    except ImportError:
        raise CoterieError("sampler = optuna needs a package: pip install 'coterie[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    values: dict[str, dict[str, list[Any]]] = {}
    for t in tuning.trials:
        its_values = values.setdefault(t.method, {})
        for k, v in t.chosen.items():
            if v not in its_values.setdefault(k, []):
                its_values[k].append(v)
    number_of = {_key(t.method, t.chosen): t.number for t in tuning.trials}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=2 * _GENERATION))
    first, picked = tuning.plan.rounds[0], list[int]()
    for _ in range(50 * n):
        if len(picked) >= n:
            break
        proposals = []
        for _ in range(_GENERATION):
            proposal = study.ask()
            method = proposal.suggest_categorical("method", list(values))
            chosen = {
                k: v[proposal.suggest_categorical(f"{method}.{k}", list(range(len(v))))]
                for k, v in values[method].items()
            }
            proposals.append((proposal, number_of[_key(method, chosen)]))
        fresh = [i for i in dict.fromkeys(i for _, i in proposals) if i not in picked][: n - len(picked)]
        picked += fresh
        if fresh and not advance(fresh, first):
            break
        sign = 1 if tuning.values and tuning.metric.lower else -1
        for proposal, i in proposals:
            value = tuning.values.get(i, {}).get(first, math.nan)
            if math.isfinite(value):
                study.tell(proposal, sign * value)
            else:
                study.tell(proposal, state=optuna.trial.TrialState.FAIL)
    return picked


def _key(method: str, chosen: Mapping[str, Any]) -> tuple[str, str]:
    return method, json.dumps(dict(chosen), sort_keys=True, default=str)


def _check_trials(trials: Sequence[Trial], engine: Engine) -> None:
    """Prepare a run for every method, name and partition, so that mistakes are found before anything is trained."""
    first: dict[tuple[str, str, str], Trial] = {}
    for t in reversed(trials):
        first[t.method, "", ""] = t
        for k, v in t.chosen.items():
            if k in PartitionSettings.model_fields or not isinstance(v, int | float):
                first[t.method, k, str(v)] = t
    s = trials[0].cell.settings  # all trials have the same data
    dataset = trials[0].cell.objects.dataset or load_dataset(s.data, engine.data_dir, s.subset, s.task, s.columns)
    for t in {t.number: t for t in first.values()}.values():
        settings, loaded = t.cell.settings, None if "subset" in t.chosen else dataset
        session = prepare(settings, engine, t.cell.objects, loaded, initial_values(settings))
        if not session.federation.sizes("val").any():
            raise CoterieError("tune chooses on validation data, and no client has any (set val_share)")


def _validation_value(run: Run, round: int) -> float:
    """Return the value on validation data after this round; NaN where it is not defined."""
    scores: dict[str, Any] = next((e["eval"] for e in run.events if e["round"] == round), {})
    for view in (run.headline, "personal"):
        if (stats := scores.get(f"{view}/val")) is not None:
            return math.nan if stats["mean"] is None or stats.get("nonfinite") else float(stats["mean"])
    return math.nan
