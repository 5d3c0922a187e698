"""`coterie figure`: one figure of one or several runs, as PNG, SVG and PDF."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import console

figure_app = typer.Typer()


@figure_app.command("figure")
def figure(
    kind: Annotated[str, Argument(help="rounds, loss, bytes, cost, aun, bars, axis, clients, arena, layers, ...")],
    folders: Annotated[list[Path], Argument(metavar="RUN...", help="folders of runs, or folders that hold runs")],
    out: Annotated[
        Path | None, Option("--out", "-o", help="the file to write: .png, .svg and .pdf (default: KIND)")
    ] = None,
    view: Annotated[
        str, Option(help="curve to draw, for example personal/test/mean or participants/before/pooled")
    ] = "",
    axis: Annotated[str, Option(help="for the kind axis: the setting to draw against, for example join")] = "",
    score: o.ScoredView = "",
    against: Annotated[str | None, Option(help="for the kind arena: comma-separated list of controls")] = None,
    methods: Annotated[str | None, Option(help="comma-separated list of methods")] = None,
    data_dir: o.DataDir = None,
    as_json: o.Json = False,
) -> None:
    """Draw a figure of runs: accuracy, bytes, clusters, clients and more."""
    from coterie.config import engine
    from coterie.engine.session import rebuild
    from coterie.errors import unknown
    from coterie.results.discovery import find_runs
    from coterie.results.report import figures

    if kind not in figures.KINDS:
        raise unknown("kind of figure", kind, figures.KINDS)
    damaged: list[str] = []
    runs = find_runs(folders, damaged.append)
    for sentence in damaged:
        typer.echo(f"coterie: {sentence}", err=True)
    names = {n for r in runs for n in (r.title, str(r.settings["method"]))}
    wanted = o.commas(methods)
    for m in wanted:
        if m not in names:
            raise unknown("method among these runs", m, names)
    runs = [r for r in runs if not wanted or r.title in wanted or r.settings["method"] in wanted]
    if data_dir is not None and kind in ("labels", "similarity"):
        for r in runs:
            r._session = rebuild(r.path, engine(workers=1, data_dir=data_dir))
    drawn = figures.draw(kind, runs, view=view, axis=axis, score=score, against=o.commas(against))
    files = figures.save_figure(drawn, out or Path(kind))
    if as_json:
        typer.echo(json.dumps({"files": [str(file) for file in files]}))
    else:
        for file in files:
            console.print(f"figure: {file}", soft_wrap=True, highlight=False)
    if damaged:
        raise typer.Exit(1)
