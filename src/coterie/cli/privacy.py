"""`coterie privacy`: what a budget of differential privacy means in noise, rounds and participants."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from typer import Option

from coterie.cli import options as o
from coterie.cli.screen import console

privacy_app = typer.Typer(no_args_is_help=True, help="Plan differential privacy.")


@privacy_app.callback()
def _main() -> None:
    pass


@privacy_app.command("plan")
def privacy_plan(
    epsilon: Annotated[
        float | None, Option(help="budget; without --sigma, the noise that it needs is computed")
    ] = None,
    sigma: Annotated[float | None, Option(help="noise multiplier; its epsilon is computed")] = None,
    delta: Annotated[float, Option(help="probability with which the bound may fail")] = 1e-5,
    rounds: Annotated[int, Option(min=1, help="rounds, or all steps of a client for example(...)")] = 50,
    join: Annotated[
        float, Option(help="probability that a client takes part in a round; batch / samples for steps")
    ] = 0.5,
    clients: Annotated[int | None, Option(min=1, help="clients, for the noise on the mean")] = None,
    values: Annotated[int | None, Option(min=1, help="uploaded values, for the noise on the mean")] = None,
    clip: Annotated[float, Option(help="largest norm of a client's change")] = 1.0,
    out: Annotated[Path | None, Option("--out", "-o", help="draw epsilon by rounds: .png, .svg and .pdf")] = None,
    as_json: o.Json = False,
) -> None:
    """Go from epsilon to noise, rounds and participation, and back."""
    from coterie.privacy.planning import draw_plan, make_plan

    made = make_plan(epsilon, sigma, delta, rounds, join, clients, values, clip)
    files = draw_plan(made, out) if out is not None else []
    if as_json:
        typer.echo(json.dumps({**made.facts, "table": made.rows, "files": [str(f) for f in files]}))
        return
    for name, value in made.facts.items():
        console.print(f"{name + ':':34} {value:.5g}", markup=False, highlight=False)
    table = Table(title=f"epsilon at delta = {delta:g}", title_justify="left")
    for name in made.rows[0]:
        table.add_column(name, justify="right")
    for row in made.rows:
        table.add_row(*(f"{v:.4g}" for v in row.values()))
    console.print(table)
    for file in files:
        console.print(f"figure: {file}", soft_wrap=True, highlight=False)
