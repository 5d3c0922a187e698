"""`coterie arena`: methods against their controls, from runs that have ended."""

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
    against: Annotated[str | None, Option(help="controls, by commas (default: usual and own ones)")] = None,
    methods: Annotated[str | None, Option(help="what is held against them, by commas (default: all others)")] = None,
    score: o.Score = "",
    selected: Annotated[bool, Option("--selected", help="at the round with the best validation accuracy")] = False,
    markdown: Annotated[bool, Option("--markdown", help="print Markdown tables")] = False,
    as_json: Annotated[bool, Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Paired differences to controls, with 95 % intervals over seeds and clients."""
    from coterie.errors import CoterieError
    from coterie.results.controls import control_tables
    from coterie.results.discovery import find_runs

    damaged: list[str] = []
    runs = [r for r in find_runs(folders, damaged.append) if r.events]
    found = control_tables(runs, o.commas(against), score, o.commas(methods), "selected" if selected else "last")
    said = [*damaged, *dict.fromkeys(w for a in found for w in a.warnings())]
    if not any(a.pairs for a in found):
        raise CoterieError("; ".join(["these runs hold no method together with a control of it", *said]))
    if as_json:
        typer.echo(json.dumps([row for a in found for row in json.loads(a.frame().to_json(orient="records"))]))
    elif markdown:
        typer.echo("\n".join(_titled(a) + a.markdown() for a in found if a.pairs))
    else:
        show_control_tables(found)
    for sentence in said:
        typer.echo(f"coterie: {sentence}", err=True)
    if damaged:
        raise typer.Exit(1)


def _titled(arena: "ControlTable") -> str:
    return f"## {arena.group}\n\n" if arena.group else ""


def show_control_tables(arenas: "Sequence[ControlTable]") -> None:
    """A small table for each method, with what the numbers mean below."""
    for a in arenas:
        if len(arenas) > 1 and a.pairs:
            console.print(a.group, highlight=False)
        for head, table in a.readable().items():
            shown = Table(title=head, title_justify="left")
            for name in ("against", *table.columns):
                shown.add_column(name, justify="left" if name == "against" else "right", no_wrap=name != "against")
            for label, row in zip(table.index, table.values, strict=True):
                shown.add_row(str(label), *row)
            console.print(shown)
    said = list(dict.fromkeys(a.covers() for a in arenas if a.pairs))
    console.print(
        "difference: mean over the same clients and seeds, in points; 95 % interval by bootstrap; gain, lose, tie: "
        f"clients above, below and at a difference of 0; {'; '.join(said)}",
        highlight=False,
    )
