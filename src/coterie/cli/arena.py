"""`coterie arena`: compare methods with their controls, from the folders of runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coterie.results.controls import ControlTable

arena_app = typer.Typer()


@arena_app.command("arena")
def arena(
    folders: Annotated[list[Path], Argument(metavar="RUN...", help="folders of runs, or folders that hold runs")],
    against: Annotated[
        str | None, Option(help="comma-separated list of controls (default: the usual ones and those of the method)")
    ] = None,
    methods: Annotated[
        str | None, Option(help="comma-separated list of methods to compare with them (default: all others)")
    ] = None,
    score: o.ScoredView = "",
    selected: Annotated[bool, Option("--selected", help="score the round with the best validation accuracy")] = False,
    form: o.TableFormat = None,
    markdown: Annotated[bool, Option("--markdown", help="the same as --format markdown", hidden=True)] = False,
    as_json: Annotated[bool, Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Show paired differences to controls, with 95 % intervals over seeds and clients."""
    import pandas as pd

    from coterie.errors import CoterieError
    from coterie.results.controls import control_tables
    from coterie.results.discovery import find_runs

    form = "markdown" if markdown else o.check_format(form)
    damaged: list[str] = []
    runs = [r for r in find_runs(folders, damaged.append) if r.events]
    tables = control_tables(runs, o.commas(against), score, o.commas(methods), "selected" if selected else "last")
    notes = [*damaged, *dict.fromkeys(w for t in tables for w in t.warnings())]
    if not any(t.pairs for t in tables):
        raise CoterieError("; ".join(["these runs hold no method together with a control of it", *notes]))
    if as_json:
        typer.echo(json.dumps([row for t in tables for row in json.loads(t.frame().to_json(orient="records"))]))
    elif form == "csv":
        typer.echo(pd.concat([t.frame() for t in tables]).to_csv(index=False), nl=False)
    elif form is not None:
        head = "## {}\n\n" if form == "markdown" else "\\subsection*{{{}}}\n\n"
        texts = [(head.format(t.group) if t.group else "") + getattr(t, form)() for t in tables if t.pairs]
        typer.echo("\n".join(texts))
    else:
        show_control_tables(tables)
    for sentence in notes:
        typer.echo(f"coterie: {sentence}", err=True)
    if damaged:
        raise typer.Exit(1)


def show_control_tables(tables: "Sequence[ControlTable]") -> None:
    """Print a small table for each method, and an explanation of the numbers."""
    for a in tables:
        if len(tables) > 1 and a.pairs:
            console.print(a.group, highlight=False)
        for head, table in a.readable().items():
            shown = Table(title=head, title_justify="left")
            for name in ("against", *table.columns):
                shown.add_column(name, justify="left" if name == "against" else "right", no_wrap=name != "against")
            for label, row in zip(table.index, table.values, strict=True):
                shown.add_row(str(label), *row)
            console.print(shown)
    scopes = list(dict.fromkeys(a.covers() for a in tables if a.pairs))
    console.print(
        "difference: mean over the same clients and seeds, in points; 95 % interval by bootstrap; gain, lose, tie: "
        f"clients above, below and at a difference of 0; {'; '.join(scopes)}",
        highlight=False,
    )
