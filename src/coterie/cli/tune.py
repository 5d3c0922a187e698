"""`coterie tune`: settings and methods chosen on validation data."""

import json
from typing import Annotated, Any

import typer
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import Stop, bar, console, frame_table, say

tune_app = typer.Typer()


@tune_app.command()
def tune(
    methods: Annotated[list[str], Argument(help="methods to choose from")],
    set_: Annotated[
        list[str] | None, Option("--set", help="values to choose from, as lr=0.01,0.05; one value is for all trials")
    ] = None,
    rounds: o.Rounds = None,
    eta: Annotated[int, Option(help="of so many trials one goes on, to so many times the rounds")] = 3,
    budget: Annotated[int | None, Option(help="rounds of all trials together")] = None,
    minutes: Annotated[float | None, Option(help="stop after this time; the same command goes on")] = None,
    trials: Annotated[int | None, Option(help="at most so many combinations")] = None,
    sampler: Annotated[str, Option(help="grid, random or optuna (which combinations, if not all)")] = "grid",
    data: o.Data = None,
    data_dir: o.DataDir = None,
    task: o.Task = None,
    model: o.Model = None,
    partition: o.Partition = None,
    clients: o.Clients = None,
    join: o.Join = None,
    epochs: o.Epochs = None,
    batch: o.Batch = None,
    seed: o.Seed = None,
    workers: o.Workers = None,
    config: o.Config = None,
    out: o.Out = None,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Search settings and methods by successive halving on validation data; prints the winning command."""
    from coterie.config import engine
    from coterie.engine.session import Objects
    from coterie.errors import CoterieError, unknown
    from coterie.results.search import SAMPLERS, Budget, make_trials, search
    from coterie.storage.atomic import finite
    from coterie.storage.new_folder import fresh_folder

    given = o.gather(config, set_, data=data, task=task, model=model, partition=partition, clients=clients, join=join,
                     epochs=epochs, batch=batch, seed=seed, rounds=rounds)  # fmt: skip
    fixed, space = _space(given)
    if not space and len(methods) < 2:
        raise CoterieError("there is nothing to choose from: give values, such as --set lr=0.01,0.05, or more methods")
    if sampler not in SAMPLERS:
        raise unknown("sampler", sampler, SAMPLERS)
    allowed = Budget(eta, budget, minutes, trials)
    folder = out or fresh_folder(f"tune-{fixed.get('data', 'digits')}")
    most = fixed.pop("rounds", 50)
    if not isinstance(most, int) or most < 1:
        raise CoterieError(f"rounds = {most!r} is invalid: it must be a number above 0")
    made = make_trials(methods, space, folder, Objects(), most, allowed, **{"data": "digits", **fixed})
    stop, kind = Stop(), next(s for s in SAMPLERS if s == sampler)
    with stop.listening(), bar("tune", len(made) * most, quiet or as_json) as update:
        how = engine(workers=workers, data_dir=data_dir)
        found = search(made, folder, how, allowed, kind, int(fixed.get("seed", 0)),
                       lambda s: update(s.done(), f"{len(s.rounds)} trials"), stop)  # fmt: skip
    for number, reason in found.failed.items():
        typer.echo(f"coterie: {found.trials[number].name} failed: {reason}", err=True)
    frame = found.frame()
    if as_json:
        best = None if found.best is None else {"method": found.best.method, "settings": dict(found.best.chosen)}
        shown: dict[str, Any] = {
            "folder": str(folder),
            "best": best,
            "command": found.command(),
            "complete": found.complete,
        }
        shown |= {"rounds": found.spent, "full_grid": found.whole}
        typer.echo(json.dumps(finite({**shown, "table": json.loads(frame.to_json(orient="records"))})))
    elif not quiet:
        _show(found, frame)
    if not found.complete:
        typer.echo(f"not finished; to go on, repeat the command with --out {folder}", err=True)
        raise typer.Exit(130 if stop.asked else 3)


def _space(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Settings with one value, and those with several, which commas separate."""
    from coterie.config import parse_assignment

    fixed, space = {}, {}
    for k, v in given.items():
        parts = o.commas(v) if isinstance(v, str) and not v.startswith(("{", "[")) else []
        if len(parts) > 1:
            space[k] = [parse_assignment(f"{k}={p}")[1] for p in parts]
        else:
            fixed[k] = v
    return fixed, space


def _show(found: Any, frame: Any) -> None:
    if found.best is None:
        return
    metric = found.metric
    text = frame.copy()
    for c in [c for c in text.columns if str(c).startswith("round ")]:
        text[c] = text[c].map(lambda v: "" if v != v else metric.text(v))
    console.print(frame_table(text.fillna(""), f"{metric.heading} on validation data, mean over clients"))
    lines = [
        f"{found.spent} rounds were trained; a full grid has {found.whole}",
        f"table.csv, tune.png and the trials' runs are in {found.folder}",
        f"the best is {found.best.name}:",
        found.command(),
    ]
    for line in lines:
        say(line)
