"""`coterie paper`: rerun a table or figure of one of the five papers and show it beside the printed values."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import Stop, bar, console, frame_table

paper_app = typer.Typer()


@paper_app.command("paper")
def paper(
    name: Annotated[str, Argument(help="fedcpmd, fedpc, fedgmh, ecs-fl, sc-fpfl; or `list`")],
    item: Annotated[str | None, Argument(help="a table or figure; `coterie paper list` names them")] = None,
    data: Annotated[str | None, Option(help="only these data sets, by commas")] = None,
    methods: Annotated[str, Option(help="only these methods, by commas, or all")] = "all",
    seeds: Annotated[int, Option(min=1)] = 1,
    rounds: Annotated[int | None, Option(min=1, help="fewer rounds than the paper")] = None,
    subset: Annotated[int | None, Option(min=1, help="so many samples of each data set")] = None,
    instead: Annotated[str | None, Option(help="a data set to use instead of another: emnist=mnist")] = None,
    set_: o.Set = None,
    data_dir: o.DataDir = None,
    workers: o.Workers = None,
    out: o.Out = None,
    quiet: o.Quiet = False,
) -> None:
    """Rerun a paper's table or figure; printed and measured values side by side."""
    from coterie.cli.app import engine_from
    from coterie.config import parse_assignment
    from coterie.errors import CoterieError
    from coterie.papers import presets, side
    from coterie.runs.run import Run
    from coterie.runs.sweep import sweep

    if name == "list":
        _list()
        return
    if item is None:
        found = ", ".join(i.name for i in presets.items(name))
        raise CoterieError(f"name a table or figure of {name}: {found}")
    stand_in = dict(pair.split("=", 1) for pair in instead.split(",")) if instead else None
    shrink = presets.Shrink(rounds, subset, dict(parse_assignment(a) for a in set_ or []), stand_in)
    chosen = presets.choose(presets.item(name, item), _commas(data), [] if methods == "all" else _commas(methods))
    folder = out or Path("runs") / f"{name}-{item}"
    cells = presets.cells(chosen, seeds, shrink, folder)
    distinct = list({c.out: c for c in cells.values()}.values())
    stop = Stop()
    with stop.listening(), bar(f"{name} {item}", sum(c.settings.rounds for c in distinct), quiet) as update:
        status = sweep(distinct, engine_from(workers, None, data_dir), lambda s: update(s.done(), _left(s)), stop)
    done = {k: Run(c.out) for k, c in cells.items() if c.out not in status.failed and c.finished()}
    if done:
        table = side.frame(chosen, done)
        verdicts = side.verdicts(chosen, table)
        note = "as in the paper" if not shrink.words() else "differs from the paper: " + ", ".join(shrink.words())
        table.to_csv(folder / "side.csv", index=False)
        text = "\n".join([f"# {presets.title(name)}", "", f"{item}: {chosen.what}; {seeds} seeds; {note}.", ""])
        text += "\n" + side.markdown(table) + "\n" + "\n".join(f"- {v}" for v in verdicts) + "\n"
        (folder / "side.md").write_text(text)
        if not quiet:
            console.print(frame_table(side.readable(table), f"{name} {item}: {chosen.what}; {note}"))
            for v in verdicts:
                console.print(v, highlight=False)
            console.print(f"runs, side.csv and side.md are in {folder}", soft_wrap=True, highlight=False)
    for path, reason in status.failed.items():
        typer.echo(f"coterie: {path.name} failed: {reason}", err=True)
    if stop.asked:
        typer.echo("stopped; the same command goes on", err=True)
        raise typer.Exit(130)
    if status.failed:
        raise typer.Exit(1 if done else 2)


def _commas(text: str | None) -> list[str]:
    """Parts between commas, except those in parentheses: `mnist,MNIST_ExDir(2,5)` are two."""
    return [t.strip() for t in re.split(r",(?![^(]*\))", text) if t.strip()] if text else []


def _left(status: object) -> str:
    seconds = status.seconds_left()  # type: ignore[attr-defined]
    return "" if seconds is None else f"about {seconds / 60:.0f} min left"


def _list() -> None:
    from coterie.papers import presets

    for name in presets.PAPERS:
        table = Table(title=f"{name} ({presets.title(name)})", title_justify="left")
        for column in ("item", "what", "methods", "columns"):
            table.add_column(column)
        for i in presets.items(name):
            table.add_row(i.name, i.what, str(len(i.rows)), ", ".join(i.columns))
        console.print(table)
