"""The commands. Heavy imports happen inside them, so that help is instant."""

import json
import shlex
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.arena import arena_app
from coterie.cli.audit import audit_app
from coterie.cli.board import board_app
from coterie.cli.catalogue import catalogue
from coterie.cli.export import export_app
from coterie.cli.federation import federation_app
from coterie.cli.figure import figure_app
from coterie.cli.flower import flower_app
from coterie.cli.paper import paper_app
from coterie.cli.privacy import privacy_app
from coterie.cli.screen import Stop, console, frame_table
from coterie.cli.tune import tune_app

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=(
    "Personalised federated learning: many clients train together, and each ends up with a model of its own."
))  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"coterie {version('coterie')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, Option("--version", help="print the version and end", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.add_typer(catalogue)
app.add_typer(paper_app)
app.add_typer(federation_app)
app.add_typer(flower_app, name="flower")
app.add_typer(audit_app)
app.add_typer(privacy_app, name="privacy")
app.add_typer(figure_app)
app.add_typer(arena_app)
app.add_typer(board_app)
app.add_typer(export_app)
app.add_typer(tune_app)


@app.command()
@o.takes_settings(*o.OPTIONS)
def run(
    given: dict[str, Any],
    method: Annotated[str | None, Argument(help="a method; `coterie list methods` names them")] = None,
    data_dir: o.DataDir = None,
    workers: o.WorkersOption = None,
    engine: o.EngineOption = None,
    device: o.DeviceOption = None,
    state: o.StateAt = None,
    runtime: o.RuntimeAt = None,
    transport: o.Transport = None,
    address: o.Address = None,
    out: o.Out = None,
    resume: Annotated[Path | None, Option(help="continue the run in this folder; more --rounds extend it")] = None,
    from_round: o.FromRound = None,
    keep: o.Keep = None,
    track: o.Track = None,
    as_in_paper: Annotated[
        bool, Option("--as-in-paper", help="take the settings of the method's paper; other options override them")
    ] = False,
    paper: Annotated[str | None, Option(help="with --as-in-paper: the paper of a baseline, such as fedcpmd")] = None,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Run one method, or continue an interrupted run."""
    from coterie import api
    from coterie.engine.loop import Callbacks
    from coterie.errors import CoterieError
    from coterie.progress import Bar
    from coterie.storage.atomic import json_values

    given |= {} if method is None else {"method": method}
    o.check_transport(transport)
    silent = quiet or as_json
    stop = Stop()
    with stop.listening(), Bar(silent) as progress:
        how: dict[str, Any] = {
            "workers": workers, "state": state, "runtime": runtime, "address": address, "engine": engine,
            "device": device, "keep": keep, "data_dir": data_dir, "track": track,
            "callbacks": Callbacks(
                on_start=progress.start,
                on_round=lambda p: progress.update(p.round, p.text),
                on_info=_ignore if silent else _print,
                on_warning=_warn,
                should_stop=stop,
            ),
        }  # fmt: skip
        if resume is not None:
            if others := sorted(set(given) - {"rounds"} | ({"as_in_paper"} if as_in_paper else set())):
                raise CoterieError(f"--resume continues a run with its settings; leave out {', '.join(others)}")
            result = api.resume(resume, rounds=given.get("rounds"), from_round=from_round, **how)
        else:
            if "method" not in given:
                raise CoterieError(
                    "name a method, for example `coterie run fedrep`; `coterie list methods` shows them all"
                )
            if from_round is not None:
                raise CoterieError("--from-round rolls a run back; name the run with --resume")
            if paper is not None and not as_in_paper:
                raise CoterieError("--paper names the paper of --as-in-paper")
            result = api.run(given.pop("method"), given.pop("data", ""), given.pop("model", None),
                             as_in_paper=paper or as_in_paper, out=out, **how, **given)  # fmt: skip
    if as_json:
        typer.echo(json.dumps(json_values({"run": str(result.path), "finished": result.finished, **result.summary()})))
    elif not quiet:
        _show_run(result)
    for sentence in result.warnings():
        if sentence not in result.description.get("warnings", ()):  # said before training
            _warn(sentence)
    if not result.finished:
        resumed = f"coterie run --resume {result.path}"
        typer.echo(f"stopped after round {result.last_round}; continue with: {resumed}", err=True)
        raise typer.Exit(130)
    if result.diverged:
        raise typer.Exit(4)


@app.command()
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
    "lr",
    "class_weights",
    "robust",
    "attack",
    use=o.UseOfAll,
)
def compare(
    given: dict[str, Any],
    methods: Annotated[list[str], Argument(help="methods; Local-Only is always added")],
    against: Annotated[
        str | None, Option(help="controls: add what every method must beat, and what each names; or methods, by commas")
    ] = None,
    equal: Annotated[
        str, Option(help="steps, samples, bytes or time: give every method as much of it as FedAvg has in its rounds")
    ] = "",
    seeds: Annotated[int, Option(min=1, help="runs per method, with seeds 0, 1, ...")] = 1,
    data_dir: o.DataDir = None,
    workers: o.WorkersOption = None,
    engine: o.EngineOption = None,
    device: o.DeviceOption = None,
    out: o.Out = None,
    also: o.Also = None,
    track: o.Track = None,
    form: o.TableFormat = None,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Run several methods on the same clients and print one table. `all` stands for every method."""
    from coterie import api
    from coterie.cli.arena import show_control_tables
    from coterie.engine.loop import Callbacks
    from coterie.methods import method_names
    from coterie.progress import Bar
    from coterie.storage.run_folder import fresh_folder

    names = list(dict.fromkeys(m for name in methods for m in (method_names() if name == "all" else [name])))
    folder = out or fresh_folder(f"compare-{given.get('data', 'digits')}")
    silent, rivals, stop = quiet or as_json or o.check_format(form) is not None, o.commas(against), Stop()
    with stop.listening(), Bar(silent) as progress:
        callbacks = Callbacks(
            on_start=progress.start, on_info=_ignore if silent else _print, on_warning=_warn, should_stop=stop
        )
        outcome = api.run_comparison(
            names, given.pop("data", "digits"), given.pop("model", None), against=rivals, equal=equal, seeds=seeds,
            out=folder, also=o.commas(also), workers=workers, engine=engine, device=device, data_dir=data_dir,
            track=track, callbacks=callbacks, on_status=lambda s: progress.update(s.done(), s.running()), **given,
        )  # fmt: skip
    failed = outcome.status.failed
    for sentence in outcome.status.said:
        _warn(sentence)
    if outcome.comparison is not None:
        table, arena = outcome.comparison, outcome.arena
        if as_json:
            content = {"folder": str(folder), "table": json.loads(table.table().to_json(orient="index"))}
            if arena is not None:
                content["arena"] = json.loads(arena.frame().to_json(orient="records"))
            typer.echo(json.dumps(content))
        elif form is not None:
            typer.echo("\n".join(getattr(t, form)() for t in (table, arena) if t is not None), nl=False)
        elif not quiet:
            _show_table(table, table.heading)
            if arena is not None:
                show_control_tables([arena])
            tables = "the table" if arena is None else "the tables"
            _print(f"the runs and {tables} as CSV, Markdown and LaTeX are in {folder}")
        for sentence in [*table.warnings(), *(arena.warnings() if arena is not None else [])]:
            _warn(sentence)
    for reason in dict.fromkeys(failed.values()):
        paths = [path.name for path, why in failed.items() if why == reason]
        _warn(f"{', '.join(paths)} failed: {reason}")
    if stop.asked:
        typer.echo(f"stopped; to resume, repeat the command with --out {folder}", err=True)
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(2 if outcome.comparison is None else 1)


class Order(StrEnum):
    date = "date"
    name = "name"
    method = "method"
    score = "score"


@app.command()
def runs(
    folder: Annotated[Path, Argument(help="where to look")] = Path("runs"),
    sort: Annotated[Order, Option(help="newest first, or by name, method or score")] = Order.date,
    as_json: o.Json = False,
) -> None:
    """List the runs in a folder."""
    import pandas as pd

    from coterie.errors import CoterieError
    from coterie.results.discovery import run_folders
    from coterie.results.run import Run
    from coterie.storage.atomic import json_values

    paths = run_folders(folder)
    if not paths:
        raise CoterieError(f"there are no runs in {folder}")
    rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    for path in paths:
        try:
            r = Run(path)
            s = r.summary()
        except CoterieError as e:  # one damaged run must not hide the others
            damaged.append(str(e))
            continue
        shown = r.headline if r.headline in s else "personal"
        personal = s.get(shown, {})
        rows.append({
            "run": str(path), "date": path.joinpath("settings.json").stat().st_mtime, "method": r.title,
            "data": r.data, "partition": r.partition,
            "seed": r.settings["seed"], "round": r.last_round, "rounds": r.settings["rounds"],
            "metric": r.metric.name, "value": personal.get("last"), "headline": shown,
            "diverged": personal.get("nonfinite", 0),
            "clients": personal.get("clients", 0),
        })  # fmt: skip
    rows.sort(key=_ORDERS[sort])
    if as_json:
        typer.echo(json.dumps([json_values(r) for r in rows]))
    elif rows:
        names = [str(Path(r["run"]).relative_to(folder)) if Path(r["run"]) != folder else r["run"] for r in rows]
        shown = pd.DataFrame([_run_row(r) for r in rows], index=names)
        shown.index.name = "run"
        console.print(frame_table(shown, f"in {folder}"))
    for sentence in damaged:
        _warn(sentence)
    if damaged:
        raise typer.Exit(1)


_ORDERS: dict[Order, Callable[[dict[str, Any]], Any]] = {
    Order.date: lambda r: -r["date"],
    Order.name: lambda r: r["run"],
    Order.method: lambda r: (r["method"], r["run"]),
    Order.score: lambda r: (r["metric"], _worse(r)),
}


def _worse(r: dict[str, Any]) -> float:
    """Larger for worse scores."""
    return float("inf") if r["value"] is None else (r["value"] if _metric(r).lower else -r["value"])


def _metric(r: dict[str, Any]) -> Any:
    from coterie.core.tasks import TASKS

    return next(m for t in TASKS.values() for m in t.metrics if m.name == r["metric"])


def _run_row(r: dict[str, Any]) -> dict[str, str]:
    value = "" if r["value"] is None else _metric(r).text(r["value"])
    if value and r["metric"] != "accuracy":
        value = f"{r['metric']} {value}"
    if r["headline"] != "personal":
        value += f" ({r['headline']})"
    if r["diverged"]:
        value += f" (diverged: {r['diverged']} of {r['clients']} clients)"
    return {
        "begun": time.strftime("%Y-%m-%d %H:%M", time.localtime(r["date"])), "method": r["method"],
        "round": f"{r['round']}/{r['rounds']}", "score": value, "data": r["data"], "seed": str(r["seed"]),
        "partition": r["partition"],
    }  # fmt: skip


def _warn(sentence: str) -> None:
    typer.echo(f"coterie: {sentence}", err=True)


def _print(sentence: str) -> None:
    console.print(sentence, soft_wrap=True, highlight=False)


def _ignore(sentence: str) -> None:
    pass


def _show_table(comparison: Any, title: str) -> None:
    """Show all columns if they fit, otherwise the main ones."""
    shown = comparison.readable(brief=console.width < 130)
    console.print(frame_table(shown.drop(columns="selected", errors="ignore") if console.width < 90 else shown, title))


def _show_run(run: Any) -> None:
    from coterie.results.comparison import Comparison

    if run.events:
        _show_table(Comparison([run]), f"after round {run.last_round}; {run.metric.heading}, mean over clients")
    if run.ended:
        said = f"ended after round {run.last_round} of {run.settings['rounds']}: {run.ended}"
        _print(said)
    _print(f"the run is in {run.path}")


@app.command()
def report(
    folders: Annotated[list[Path], Argument(metavar="RUN...", help="folders of runs, or folders that hold runs")],
    out: Annotated[Path, Option("--out", "-o", help="the file to write")] = Path("report.html"),
    title: Annotated[str, Option(help="heading of the page")] = "",
    score: o.ScoredView = "",
    also: o.Also = None,
    as_json: o.Json = False,
) -> None:
    """Write one HTML page about one or several runs; it opens offline."""
    from coterie.results.report.page import write_report

    damaged: list[str] = []
    words = ["coterie", "report", *map(str, folders), "-o", str(out), *(["--title", title] if title else [])]
    words += [*(["--score", score] if score else []), *(["--also", also] if also else [])]
    written = write_report(folders, out, title, damaged.append, shlex.join(words), score, o.commas(also))
    if as_json:
        typer.echo(json.dumps({"report": str(written), "damaged": damaged}))
    else:
        _print(f"report: {written}")
    for sentence in damaged:
        _warn(sentence)
    if damaged:
        raise typer.Exit(1)
