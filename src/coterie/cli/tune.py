"""`coterie tune`: choose settings and methods on validation data."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import Stop, console, frame_table, say

if TYPE_CHECKING:
    from coterie.results.search import Tuning

tune_app = typer.Typer()


_SEARCHED = Annotated[
    list[str] | None,
    Option("--set", help="values to choose from, such as lr=0.01,0.05; a single value applies to all trials"),
]


@tune_app.command()
@o.takes_settings(
    "data",
    *o.COLUMN_OPTIONS,
    "task",
    "model",
    "partition",
    "clients",
    "join",
    "rounds",
    "epochs",
    "batch",
    "class_weights",
    "seed",
    set_=_SEARCHED,
)
def tune(
    given: dict[str, Any],
    methods: Annotated[list[str], Argument(help="methods to choose from")],
    eta: Annotated[int, Option(help="one of every ETA trials is promoted, to ETA times the rounds")] = 3,
    budget: Annotated[int | None, Option(help="rounds of all trials together")] = None,
    minutes: Annotated[float | None, Option(help="stop after this time; the same command continues the search")] = None,
    trials: Annotated[int | None, Option(help="largest number of combinations")] = None,
    sampler: Annotated[
        str, Option(help="grid, random or optuna: choice of combinations if not all are tried")
    ] = "grid",
    data_dir: o.DataDir = None,
    workers: o.WorkersOption = None,
    device: o.DeviceOption = None,
    out: o.Out = None,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Search settings and methods by successive halving on validation data, and print the winning command."""
    from coterie.api import tune as tune_settings
    from coterie.engine.loop import Callbacks
    from coterie.errors import CoterieError, unknown
    from coterie.progress import Bar
    from coterie.results.search import SAMPLERS
    from coterie.storage.atomic import json_values
    from coterie.storage.run_folder import fresh_folder

    fixed, space = _space(given)
    if not space and len(methods) < 2:
        raise CoterieError("give values to choose from, such as --set lr=0.01,0.05, or more methods")
    if sampler not in SAMPLERS:
        raise unknown("sampler", sampler, SAMPLERS)
    folder = out or fresh_folder(f"tune-{fixed.get('data', 'digits')}")
    most = fixed.pop("rounds", 50)
    if not isinstance(most, int) or most < 1:
        raise CoterieError(f"rounds = {most!r} is invalid: it must be a number above 0")
    stop = Stop()
    with stop.listening(), Bar(quiet or as_json) as progress:
        tuning = tune_settings(
            methods, fixed.pop("data", "digits"), fixed.pop("model", None), space=space, rounds=most, eta=eta,
            budget=budget, minutes=minutes, trials=trials, sampler=next(s for s in SAMPLERS if s == sampler),
            seed=int(fixed.pop("seed", 0)), out=folder, workers=workers, device=device, data_dir=data_dir,
            callbacks=Callbacks(on_start=progress.start, should_stop=stop),
            on_status=lambda s: progress.update(s.done(), f"{len(s.rounds)} trials"), **fixed,
        )  # fmt: skip
    for number, reason in tuning.failed.items():
        typer.echo(f"coterie: {tuning.trials[number].name} failed: {reason}", err=True)
    frame = tuning.frame()
    if as_json:
        best = None if tuning.best is None else {"method": tuning.best.method, "settings": dict(tuning.best.chosen)}
        shown: dict[str, Any] = {
            "folder": str(folder),
            "best": best,
            "command": tuning.command(),
            "complete": tuning.complete,
        }
        shown |= {"rounds": tuning.spent, "full_grid": tuning.whole}
        typer.echo(json.dumps(json_values({**shown, "table": json.loads(frame.to_json(orient="records"))})))
    elif not quiet:
        _show(tuning, frame)
    if not tuning.complete:
        typer.echo(f"not finished; to continue, repeat the command with --out {folder}", err=True)
        raise typer.Exit(130 if stop.asked else 3)


def _space(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Split settings into those with one value and those with several, which are separated by commas."""
    from coterie.config import parse_assignment

    fixed, space = {}, {}
    for k, v in given.items():
        parts = o.commas(v) if isinstance(v, str) and not v.startswith(("{", "[")) else []
        if len(parts) > 1:
            space[k] = [parse_assignment(f"{k}={p}")[1] for p in parts]
        else:
            fixed[k] = v
    return fixed, space


def _show(tuning: "Tuning", frame: Any) -> None:
    if tuning.best is None:
        return
    metric = tuning.metric
    text = frame.copy()
    for c in [c for c in text.columns if str(c).startswith("round ")]:
        text[c] = text[c].map(lambda v: "" if v != v else metric.text(v))
    console.print(frame_table(text.fillna(""), f"{metric.heading} on validation data, mean over clients"))
    lines = [
        f"{tuning.spent} rounds were trained; a full grid has {tuning.whole}",
        f"table.csv, tune.png and the trials' runs are in {tuning.folder}",
        f"the best is {tuning.best.name}:",
        tuning.command(),
    ]
    for line in lines:
        say(line)
