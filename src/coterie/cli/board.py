"""`coterie board`: a live page about runs and a federation."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from coterie.cli import options as o

board_app = typer.Typer()


@board_app.command("board")
def board(
    folder: Annotated[Path, Argument(metavar="RUNS", help="folder with runs")] = Path("runs"),
    federation: Annotated[Path | None, Option(help="folder of `coterie serve` or `coterie up`")] = None,
    host: Annotated[
        str, Option(help="address to listen on; addresses for other machines need --allow-host")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="port to listen on; 0: any free port")] = 8765,
    allow_host: Annotated[
        list[str] | None, Option(help="name by which other machines reach the board; repeatable")
    ] = None,
    token_file: Annotated[
        Path | None, Option(help="file that keeps the token, for Prometheus; made if it does not exist")
    ] = None,
    data_dir: o.DataDir = None,
) -> None:
    """Show runs in progress in the browser; start, stop and resume them with the token that is printed."""
    from coterie.errors import CoterieError

    try:
        from coterie.board.server import serve_board
    except ModuleNotFoundError as e:
        raise CoterieError(
            f"the board needs the extra board: pip install 'coterie[board]' ({e.name} is missing)"
        ) from e
    serve_board(folder, federation, host, port, allow_host or [], data_dir, token_file, lambda text: typer.echo(text))
