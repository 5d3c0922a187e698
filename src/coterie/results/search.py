"""Settings and methods chosen on validation data by successive halving (Jamieson, Talwalkar, AISTATS 2016).

Every trial is a run. All of them train a few rounds; the best third goes on to three times as many, and so on. A trial
that goes on continues its own run, to the bit as if it had never paused, so no round is computed twice and a killed
search continues where it was. Test data decide nothing.
"""

import json
import math
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

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
from coterie.results.grid import Cell, Status, sweep
from coterie.results.run import Run
from coterie.storage.atomic import write_atomic

Sampler = Literal["grid", "random", "optuna"]
SAMPLERS: tuple[Sampler, ...] = ("grid", "random", "optuna")
GENERATION = 4  # trials that Optuna proposes at a time; a fixed number, so that nothing depends on workers
MOST = 100_000  # combinations
SHARED = ("rounds", "method", "seed", "data", "eval_every", "checkpoint_every", "final_trained", "watch", "stop_after")


@dataclass(frozen=True)
class Trial:
    """One combination."""

    number: int
    method: str
    chosen: Mapping[str, Any]  # the settings that are searched
    cell: Cell

    @property
    def name(self) -> str:
        return ", ".join([self.method, *(f"{k}={v}" for k, v in self.chosen.items())])


@dataclass(frozen=True)
class Plan:
    """How many trials reach which round."""

    rounds: tuple[int, ...]
    trials: tuple[int, ...]

    @staticmethod
    def of(trials: int, rounds: int, eta: int) -> "Plan":
        steps = 0
        while eta ** (steps + 1) <= min(trials, rounds):
            steps += 1
        first = max(1, rounds // eta**steps)
        at = [first * eta**i for i in range(steps)] + [rounds]
        return Plan(tuple(at), tuple(max(1, trials // eta**i) for i in range(steps + 1)))

    @property
    def cost(self) -> int:
        """Rounds of all trials together."""
        before = (0, *self.rounds)
        return sum(n * (t - s) for n, t, s in zip(self.trials, self.rounds, before, strict=False))


@dataclass
class Tuning:
    """What a search found. `best` is None while nothing has been scored."""

    folder: Path
    trials: list[Trial]
    plan: Plan
    values: dict[int, dict[int, float]] = field(default_factory=dict)  # trial -> round -> value on validation data
    failed: dict[int, str] = field(default_factory=dict)
    complete: bool = False

    @property
    def metric(self) -> Any:
        for i in self.values:  # not every combination is tried
            return Run(self.trials[i].cell.out, objects=self.trials[i].cell.objects).metric
        return None

    def ranked(self, among: Iterable[int], at: int) -> list[int]:
        """Trials from best to worst by their value at this round; equal ones by their number."""
        lower = self.metric is not None and self.metric.lower

        def key(i: int) -> tuple[float, int]:
            value = self.values.get(i, {}).get(at, math.nan)
            return (math.inf if math.isnan(value) else value if lower else -value), i

        return sorted(among, key=key)

    @property
    def best(self) -> Trial | None:
        """The best of those that went furthest."""
        scored = {i: max(v) for i, v in self.values.items() if v}
        if not scored:
            return None
        far = max(scored.values())
        return self.trials[self.ranked([i for i, t in scored.items() if t == far], far)[0]]

    @property
    def spent(self) -> int:
        """Rounds that were trained."""
        return sum(max(v, default=0) for v in self.values.values())

    @property
    def whole(self) -> int:
        """Rounds of a full grid."""
        return len(self.trials) * self.plan.rounds[-1]

    def frame(self) -> pd.DataFrame:
        """One row per trial, best first: settings, rounds trained, value on validation data at each step."""
        rows = []
        searched = dict.fromkeys(k for t in self.trials for k in t.chosen)  # not every method has all of them
        for t in self.trials:
            mine = self.values.get(t.number, {})
            rows.append({
                "trial": t.number, "method": t.method, **{k: t.chosen.get(k) for k in searched},
                "rounds": max(mine, default=0),
                **{f"round {r}": mine.get(r, math.nan) for r in self.plan.rounds},
            })  # fmt: skip
        frame = pd.DataFrame(rows).set_index("trial")
        order: list[int] = []
        for r in reversed(self.plan.rounds):
            order += [i for i in self.ranked((i for i, v in self.values.items() if r in v), r) if i not in order]
        return frame.loc[[*order, *(t.number for t in self.trials if t.number not in order)]]

    def command(self) -> str:
        """The command line of the winner."""
        return "" if self.best is None else command(self.best.cell.settings)

    def run(self) -> Run:
        """The winner's run."""
        if self.best is None:
            raise CoterieError("no trial has been scored yet")
        return Run(self.best.cell.out, objects=self.best.cell.objects)

    def write(self) -> None:
        """table.csv, best.json and the figure."""
        write_atomic(self.folder / "table.csv", self.frame().to_csv().encode())
        if self.best is not None:
            found = {"trial": self.best.number, "method": self.best.method, "settings": dict(self.best.chosen)}
            found |= {"command": self.command(), "rounds": self.spent, "full_grid": self.whole}
            write_atomic(self.folder / "best.json", json.dumps(found, indent=1).encode())
            self._figure(self.folder / "tune.png")

    def _figure(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        fig, ax = plt.subplots(figsize=(6, 3.6), constrained_layout=True)
        best = self.best
        for i, values in self.values.items():
            at, y = zip(*sorted(values.items()), strict=True)
            mine = best is not None and i == best.number
            ax.plot(at, [self.metric.scale * v for v in y], marker="o", ms=4, lw=2 if mine else 0.8,
                    color="C0" if mine else "0.6", zorder=2 if mine else 1,
                    label=self.trials[i].name if mine else None)  # fmt: skip
        ax.set_xscale("log")
        ax.set_xticks(self.plan.rounds, [str(r) for r in self.plan.rounds])
        ax.minorticks_off()
        ax.set_xlabel("round")
        ax.set_ylabel(f"{self.metric.label}, validation part")
        ax.legend(fontsize=8)
        fig.savefig(path, dpi=150)
        plt.close(fig)


def command(s: RunSettings) -> str:
    """The command line that makes this run."""
    words = ["coterie", "run", s.method, "--data", s.data]
    given = s.model_dump(mode="json", exclude_unset=True)
    more = {**given.pop("settings", {}), **given.pop("federation", {}), **given}
    for skip in ("method", "data", "eval_every", "checkpoint_every", "final_trained", "watch"):
        more.pop(skip, None)
    for k, v in sorted(more.items()):
        if v is None:
            continue
        text = v if isinstance(v, str) else json.dumps(v) if not isinstance(v, dict) else _table(v)
        words += ["--set", f"{k}={text}"]
    return shlex.join(words)


def _table(v: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{k} = {json.dumps(x)}" for k, x in v.items()) + "}"


def make_trials(
    methods: Sequence[str | type[Method]],
    space: Mapping[str, Sequence[Any]],
    folder: Path,
    objects: Objects,
    rounds: int,
    budget: "Budget",
    **fixed: Any,
) -> list[Trial]:
    """Every combination of the settings that a method has. Settings of the run and the federation are for all methods,
    others for those that have them, `method.setting` for that one.
    """
    if not methods:
        raise CoterieError("name at least one method to tune")
    names = [m if isinstance(m, str) else m.__name__ for m in methods if method_class(m)]
    classes = {n: fields(m, given_reading(fixed, n)) for n, m in zip(names, methods, strict=True)}
    if len(classes) < len(methods):
        raise CoterieError(f"a method is named twice: {', '.join(names)}")
    for k in (*space, *fixed):
        whose, dot, setting = k.rpartition(".")
        if dot and whose not in classes:
            raise unknown("method in the setting", whose, classes)
        if k not in ("settings", "federation"):
            owner(setting, *([classes[whose]] if dot else classes.values()))
    for k, values in space.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise CoterieError(f"{k} = {values!r} is invalid: a setting that is searched has a list of values")
        if k.rpartition(".")[2] in SHARED:
            raise CoterieError(f"{k} cannot be searched: trials share it")
        if twice := [v for i, v in enumerate(values) if v in values[:i]]:
            raise CoterieError(f"{k} has the value {twice[0]!r} twice")
    if any(k.rpartition(".")[2] == "stop_after" and v is not None for k, v in fixed.items()):
        raise CoterieError("stop_after cannot be set: tune itself says which trials end early")
    many = sum(math.prod(len(v) for k, v in space.items() if _has(k, name, own)) for name, own in classes.items())
    if many > MOST:
        raise CoterieError(f"there are {many} combinations, more than {MOST}; give fewer values")
    first = Plan.of(budget.fits(many, rounds), rounds, budget.eta).rounds[0]  # all later steps are multiples of it
    less = {"final_trained": False, "watch": False}  # unless they are asked for
    every = {"eval_every": first, "checkpoint_every": first, "rounds": rounds}
    trials: list[Trial] = []
    for name, method in zip(names, methods, strict=True):
        mine = {k.removeprefix(f"{name}."): v for k, v in space.items() if _has(k, name, classes[name])}
        other = {k.removeprefix(f"{name}."): v for k, v in fixed.items() if _has(k, name, classes[name])}
        theirs = replace(objects, method=None if isinstance(method, str) else method)
        for values in product(*mine.values()):
            chosen = dict(zip(mine, values, strict=True))
            made = settings(**{**less, **other, **chosen, **every, "method": method})
            number = len(trials)
            trials.append(Trial(number, name, chosen, Cell(made, folder / f"{number:04d}-{name}", theirs)))
    return trials


def _has(setting: str, name: str, own: Collection[str]) -> bool:
    whose, dot, plain = setting.rpartition(".")
    if dot:
        return whose == name
    return plain in ("settings", "federation") or owner_or_none(plain, own) is not None


def owner_or_none(setting: str, own: Collection[str]) -> str | None:
    try:
        return owner(setting, own)
    except CoterieError:
        return None


@dataclass(frozen=True)
class Budget:
    """How much may be spent."""

    eta: int = 3
    rounds: int | None = None  # of all trials together
    minutes: float | None = None
    trials: int | None = None  # at most so many combinations

    def __post_init__(self) -> None:
        if self.eta < 2:
            raise CoterieError(f"eta = {self.eta} is invalid: of every so many trials one goes on, at least 2")
        for k in ("rounds", "minutes", "trials"):
            if (v := getattr(self, k)) is not None and v <= 0:
                raise CoterieError(f"{'budget' if k == 'rounds' else k} = {v} is invalid: it must be above 0")

    def fits(self, trials: int, rounds: int) -> int:
        """How many trials can be afforded."""
        n = min(trials, self.trials or trials)
        while n > 0 and self.rounds is not None and Plan.of(n, rounds, self.eta).cost > self.rounds:
            n -= 1
        if n == 0:
            raise CoterieError(f"budget = {self.rounds} is less than the {rounds} rounds of one trial; lower rounds")
        return n


def search(
    trials: Sequence[Trial],
    folder: Path,
    engine: Engine,
    budget: Budget,
    sampler: Sampler = "grid",
    seed: int = 0,
    tell: Callable[[Status], None] = lambda s: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Tuning:
    """Successive halving over the trials; repeated with the same folder it goes on where it was."""
    if sampler not in SAMPLERS:
        raise unknown("sampler", sampler, SAMPLERS)
    rounds = trials[0].cell.settings.rounds
    n = budget.fits(len(trials), rounds)
    if sampler == "grid" and n < len(trials):
        sampler = "random"  # not all of the grid can be afforded
    if (folder / "settings.json").exists():
        raise CoterieError(f"{folder} is the folder of a run; choose another one for the search")
    until = None if budget.minutes is None else time.monotonic() + 60 * budget.minutes
    _check(trials, engine)

    def over() -> bool:
        return stopped() or (until is not None and time.monotonic() > until)

    plan = Plan.of(n, rounds, budget.eta)
    found = Tuning(folder, list(trials), plan)

    def advance(numbers: Sequence[int], to: int) -> bool:
        """Train these trials to a round; False if time is over."""
        cells = {i: replace(trials[i].cell, until=to) for i in numbers}
        status = sweep(list(cells.values()), engine, tell, over)
        for i, cell in cells.items():
            if cell.out in status.failed:
                found.failed[i] = status.failed[cell.out]
            elif cell.finished():
                found.values.setdefault(i, {})[to] = _value(cell, to)
        return not over() or all(i in found.failed or to in found.values.get(i, {}) for i in numbers)

    if sampler == "optuna":
        alive = _proposed(trials, n, plan.rounds[0], found, advance, seed)
    else:
        alive = list(range(len(trials)))
        if sampler == "random" and n < len(alive):
            alive = sorted(numpy_rng(seed, "tune").permutation(len(alive))[:n].tolist())
    for to, many in zip(plan.rounds, plan.trials, strict=True):
        last = plan.rounds[plan.rounds.index(to) - 1] if to != plan.rounds[0] else None
        if last is not None:
            alive = found.ranked([i for i in alive if i not in found.failed], last)[:many]
        if not advance(alive, to):
            break
    else:
        found.complete = True
    if not found.values and found.failed:
        raise CoterieError(f"every trial failed: {next(iter(found.failed.values()))}")
    found.write()
    return found


def _proposed(
    trials: Sequence[Trial],
    n: int,
    first: int,
    found: Tuning,
    advance: Callable[[Sequence[int], int], bool],
    seed: int,
) -> list[int]:
    """Trials that Optuna's sampler proposes, a few at a time, knowing how the ones before did in their first rounds.

    The same seed and values give the same proposals, so a killed search proposes the same again.
    """
    try:
        import optuna
    except ImportError:
        raise CoterieError("sampler = optuna needs a package: pip install 'coterie[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    at = {(t.method, json.dumps(dict(t.chosen), sort_keys=True, default=str)): t.number for t in trials}
    methods = list(dict.fromkeys(t.method for t in trials))
    values: dict[str, dict[str, list[Any]]] = {m: {} for m in methods}
    for t in trials:
        for k, v in t.chosen.items():
            if v not in values[t.method].setdefault(k, []):
                values[t.method][k].append(v)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=2 * GENERATION))
    picked: list[int] = []
    for _ in range(50 * n):
        if len(picked) >= n:
            break
        asked = []
        for _ in range(GENERATION):
            trial = study.ask()
            method = trial.suggest_categorical("method", methods)
            chosen = {
                k: v[trial.suggest_categorical(f"{method}.{k}", list(range(len(v))))] for k, v in values[method].items()
            }
            asked.append((trial, at[method, json.dumps(chosen, sort_keys=True, default=str)]))
        fresh = [i for i in dict.fromkeys(i for _, i in asked) if i not in picked][: n - len(picked)]
        picked += fresh
        if fresh and not advance(fresh, first):
            break
        sign = 1 if found.values and found.metric.lower else -1
        for trial, i in asked:
            value = found.values.get(i, {}).get(first, math.nan)
            if math.isfinite(value):
                study.tell(trial, sign * value)
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return picked


def _check(trials: Sequence[Trial], engine: Engine) -> None:
    """Puts together a run for every method, name and way to divide the data, so that none fails later on."""
    first: dict[tuple[str, str, str], Trial] = {}
    for t in reversed(trials):
        first[t.method, "", ""] = t
        for k, v in t.chosen.items():
            if k in PartitionSettings.model_fields or not isinstance(v, int | float):
                first[t.method, k, str(v)] = t
    s = trials[0].cell.settings  # all have its data
    dataset = trials[0].cell.objects.dataset or load_dataset(s.data, engine.data_dir, s.subset)
    for t in {t.number: t for t in first.values()}.values():
        settings, loaded = t.cell.settings, None if "subset" in t.chosen else dataset
        session = prepare(settings, engine, t.cell.objects, loaded, initial_values(settings))
        if not session.federation.sizes("val").any():
            raise CoterieError("tune chooses on validation data, and no client has any (set val_share)")


def _value(cell: Cell, round: int) -> float:
    """The value on validation data after this round; NaN where it is not defined."""
    run = Run(cell.out, objects=cell.objects)
    event = next((e for e in run.events if e["round"] == round), None)
    if event is None:
        return math.nan
    for view in (run.headline, "personal"):
        if (stats := event["eval"].get(f"{view}/val")) is not None:
            return math.nan if stats["mean"] is None or stats.get("nonfinite") else float(stats["mean"])
    return math.nan
