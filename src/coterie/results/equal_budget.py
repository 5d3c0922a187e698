"""Give every method of a comparison the same budget: the number of rounds follows from the cost of a round.

Each cell runs a few rounds as a trial. The budget is what FedAvg (or, without it, Local-Only) costs in the rounds that
the user asked for; every other method gets the number of rounds that comes nearest to it, its opening round and the
fine-tuning of its clients included. The numbers are kept in the folder of the comparison, so that repeating the command
continues the same runs.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from coterie.config import Engine
from coterie.errors import CoterieError, unknown
from coterie.methods import registered_name
from coterie.results.controls import GENERAL, UNEQUAL
from coterie.results.grid import Cell, sweep
from coterie.results.run import Run
from coterie.storage.atomic import read_json, write_json

Budgeted = Literal["steps", "samples", "bytes", "time"]
FILE = "equal.json"
TRIAL_ROUNDS = 4  # rounds of a trial run
REFERENCES = ("fedavg", "local")  # the first of these methods among the cells sets the budget


def equalised(
    cells: Sequence[Cell], folder: Path, engine: Engine, kind: str, stopped: Callable[[], bool] = lambda: False
) -> list[Cell]:
    """Return the cells with the number of rounds that gives each method the budget of the reference."""
    if kind not in get_args(Budgeted):
        raise unknown("budget", kind, get_args(Budgeted))
    asked = {c.out.name: c.settings.rounds for c in cells}
    path, stored = folder / FILE, dict[str, int]()
    if path.exists():
        saved = read_json(path)
        if saved.get("equal") != kind or any(saved["asked"].get(k, v) != v for k, v in asked.items()):
            raise CoterieError(f"{folder} holds a comparison with a different budget; choose a new folder or remove it")
        stored = saved["rounds"]
    if asked.keys() - stored.keys():
        costs = _trial_costs(cells, folder / "trial", engine, kind, stopped)
        if stopped():
            return list(cells)
        stored = _rounds(cells, costs, kind) | stored
        write_json(path, {"equal": kind, "asked": asked, "rounds": stored})
    return [replace(c, settings=c.settings.model_copy(update={"rounds": stored[c.out.name]})) for c in cells]


Cost = tuple[float, float]  # once per run (opening round, fine-tuning), and per round


def _trial_costs(
    cells: Sequence[Cell], folder: Path, engine: Engine, kind: str, stopped: Callable[[], bool]
) -> dict[str, Cost]:
    """Run the first rounds of every cell and return its costs; the trials are deleted."""
    trials = []
    for c in cells:
        n = min(TRIAL_ROUNDS, c.settings.rounds)
        quiet = {"eval_every": n, "watch": False, "final_trained": False, "stop_after": None, "stop_at": None}
        trials.append(Cell(c.settings.model_copy(update=quiet), folder / c.out.name, c.objects, until=n))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        status = sweep(trials, engine, stopped=stopped, check=True)
        for path, reason in status.failed.items():
            raise CoterieError(f"{path.name} failed: {reason}")
        return {} if stopped() else {t.out.name: _cost(Run(t.out), kind) for t in trials}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cost(run: Run, kind: str) -> Cost:
    rounds = run.rounds
    if kind == "bytes":
        spent = rounds.filter(like="bytes/").fillna(0).sum(axis=1)
    else:
        spent = rounds["cpu" if kind == "time" else kind]
    later = spent[spent.index > 0]
    once = float(spent[spent.index == 0].sum())
    if kind in ("steps", "samples"):
        once += run.work()[kind] - run.work("personal")[kind]  # fine-tuning, if that is the model in use
    return once, float(later.mean())


def _method(cell: Cell) -> str:
    """Return the part of a cell's name that the runs of all seeds share."""
    return cell.out.name.rpartition("-s")[0]


def _rounds(cells: Sequence[Cell], costs: Mapping[str, Cost], kind: str) -> dict[str, int]:
    """Return the rounds of every cell; a method has the same number for all seeds."""
    of: dict[str, list[Cell]] = {}
    for c in cells:
        of.setdefault(_method(c), []).append(c)
    mean = {m: np.mean([costs[c.out.name] for c in mine], axis=0) for m, mine in of.items()}
    by_name = {registered_name(mine[0].settings.method): m for m, mine in reversed(of.items())}
    reference = next((by_name[name] for name in REFERENCES if name in by_name), next(iter(of)))
    asked = of[reference][0].settings.rounds
    budget = mean[reference][0] + mean[reference][1] * asked
    out: dict[str, int] = {}
    for m, mine in of.items():
        once, each = mean[m]
        rounds = round((budget - once) / each) if each else mine[0].settings.rounds  # Local-Only sends nothing
        if rounds < 1:
            raise CoterieError(
                f"{m} needs more {kind} before its first round than {reference} in {asked} rounds; give more rounds"
            )
        out |= {c.out.name: rounds for c in mine}
    return out


# ---- matched controls ------------------------------------------------------------------------------------------------
# controls that are also run with as much training as a method has, and the view in which they are compared
MATCHED = {"local": "personal", "fedavg-ft": "adapted"}


def matched_controls(runs: Sequence[Run], cells: Sequence[Cell]) -> list[Cell]:
    """Return further cells of Local-Only and FedAvg + fine-tuning, for methods that train more or less than these."""
    by_out = {c.out: c for c in cells}
    by_method: dict[str, list[Run]] = {}
    for r in runs:
        by_method.setdefault(registered_name(r.settings["method"]), []).append(r)
    out: dict[Path, Cell] = {}
    for control, view in MATCHED.items():
        for name, theirs in by_method.items():
            mine = by_method.get(control, [])
            have = np.mean([r.work(view).get("samples", np.nan) for r in mine] or [0])
            want = np.mean([r.work().get("samples", np.nan) for r in theirs])
            if name in (*GENERAL, control) or not have or np.isnan(want) or abs(want - have) <= UNEQUAL * want:
                continue
            tuning = np.mean([r.work(view)["samples"] - r.work("personal")["samples"] for r in mine])
            asked = mine[0].settings["rounds"]
            rounds = round((want - tuning) / ((have - tuning) / asked))
            for r in mine if rounds >= 1 and rounds != asked else ():
                cell = by_out[r.path]
                path = cell.out.with_name(f"{control}-{rounds}-rounds-s{r.settings['seed']}")
                settings = cell.settings.model_copy(update={"rounds": rounds})
                out[path] = Cell(settings, path, cell.objects)
    return list(out.values())
