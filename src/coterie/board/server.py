"""Serve the board, on this machine only unless names for other machines are given."""

import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from coterie.board.app import Board, make_app, open_board
from coterie.errors import CoterieError


def loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def serve_board(
    root: Path,
    federation: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    allow_hosts: Sequence[str] = (),
    data_dir: Path | None = None,
    token_file: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the board until Ctrl-C; `say` gets the address and the token.

    The token is new each time, or that of `token_file`, which is made if it does not exist.
    """
    if not loopback(host) and not allow_hosts:
        raise CoterieError(
            f"host = {host} would show the board to other machines, without encryption; if you want that, "
            "give the name by which they reach it with --allow-host"
        )
    if root.exists() and not root.is_dir():
        raise CoterieError(f"{root} is not a folder")
    if federation is not None and not federation.is_dir():
        raise CoterieError(f"there is no folder {federation}")
    token = secrets.token_urlsafe(24) if token_file is None else _kept_token(token_file)
    with listen(host, port) as listening:
        port = int(listening.getsockname()[1])
        address = f"http://{'127.0.0.1' if loopback(host) and ':' not in host else host}:{port}/"
        say(f"board: {address}#token={token}")
        say(f"token: {token}")
        server(open_board(root, federation, data_dir), token, port, tuple(allow_hosts)).run([listening])


def _kept_token(path: Path) -> str:
    """Return the token in a file that only its owner may read; make it if it does not exist."""
    try:
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_urlsafe(24) + "\n")
        token, mode = path.read_text().strip(), path.stat().st_mode
    except (OSError, ValueError) as e:
        raise CoterieError(f"{path} cannot be read or written ({e})") from None
    if len(token) < 20 or not token.isascii() or not token.isprintable():
        raise CoterieError(f"{path} holds no token of at least 20 characters; remove it, and a new one is made")
    if mode & 0o077:
        raise CoterieError(f"{path} can be read by other users; chmod 600 {path}")
    return token


def listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), port))
    except OSError as e:
        listening.close()
        raise CoterieError(f"{host}:{port} cannot be used ({e.strerror or e}); choose a different --port") from None
    return listening


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, board: Board):
        super().__init__(config)
        self.board = board

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.board.closing = True  # ends the connections of open pages
        await super().shutdown(sockets)


def server(board: Board, token: str, port: int, hosts: tuple[str, ...] = ()) -> uvicorn.Server:
    config = uvicorn.Config(
        make_app(board, token, port, hosts), log_level="warning", access_log=False, server_header=False, lifespan="off",
        ws="none", timeout_graceful_shutdown=3, limit_concurrency=256, h11_max_incomplete_event_size=16_384,
    )  # fmt: skip
    return _Server(config, board)
