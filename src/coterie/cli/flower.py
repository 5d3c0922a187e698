"""The command `coterie flower new`, which writes a Flower project."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.federation import own_data
from coterie.cli.screen import console

flower_app = typer.Typer(no_args_is_help=True, help="Coterie as an app of Flower.")


@flower_app.callback()
def flower() -> None:
    """Coterie as an app of Flower."""


@flower_app.command("new")
@o.takes_settings(
    "task", "data", "model", "partition", "clients", "join", "rounds", "epochs", "batch", "lr", "seed"
)  # fmt: skip
def flower_new(
    given: dict[str, Any],
    folder: Annotated[Path, Argument(metavar="DIR", help="a new directory; its name is the name of the app")],
    method: Annotated[str, Argument(help="a method; `coterie list methods` shows all")],
    min_clients: Annotated[int | None, Option(min=1, help="quorum: clients that each round needs (default 2)")] = None,
    deadline: Annotated[float | None, Option(min=0.1, help="seconds for which a round waits for answers")] = None,
    shape: Annotated[str | None, Option(help="shape of one item of the nodes' own data, for example 1,28,28")] = None,
    classes: Annotated[
        str, Option(help="classes of the nodes' own data: their number or their names (a,b,c); or numbers per target")
    ] = "0",
    out: Annotated[Path | None, Option(help="folder of the run on the host of the SuperLink")] = None,
    data_dir: o.DataDir = None,
) -> None:
    """Write a Flower project that runs a method on an existing SuperLink: start it with `flwr run DIR`."""
    from coterie.flower.project import write_project

    given |= {"method": method}
    cloud = {"out": out, "min_clients": min_clients, "deadline": deadline, "data_dir": data_dir}
    write_project(folder, given, {**cloud, **own_data(given.get("task"), shape, classes)})
    console.print(f"made {folder}; start it with `flwr run {folder}`", soft_wrap=True, highlight=False)
