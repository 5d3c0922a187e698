"""The board's web application. GET requests read, POST requests change something; both need the token (guard.py)."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from coterie.board import metrics
from coterie.board.control import Control
from coterie.board.federation import FederationStatus
from coterie.board.guard import LOOPBACK, Guard
from coterie.board.runs import CURVES, WatchedFolder
from coterie.errors import CoterieError
from coterie.methods import method_names
from coterie.storage.atomic import json_values

_EVERY = 1.0  # seconds between reads of the folders
_LARGEST = 65_536  # largest size of a request in bytes
_READERS = 64  # largest number of open pages
_STILL = 15.0  # seconds after which an idle stream gets a sign of life


@dataclass
class Board:
    """The state that all pages see, read once for all of them."""

    watch: WatchedFolder
    control: Control
    federation: FederationStatus | None = None
    closing: bool = False  # True ends the streams
    read_at: float = float("-inf")
    readers: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while folders are read
    _runs: list[dict[str, Any]] = field(default_factory=list)
    _about: dict[str, Any] | None = None

    async def refresh(self) -> None:
        async with self.lock:
            if time.monotonic() - self.read_at >= _EVERY * 0.9:
                await run_in_threadpool(self._read)
                self.read_at = time.monotonic()

    def _read(self) -> None:
        self.watch.refresh()
        self._runs = [run.snapshot() for run in self.watch.runs.values()]
        self._about = self.federation.snapshot() if self.federation is not None else None

    def runs(self) -> list[dict[str, Any]]:
        failed = self.control.ended()
        out = []
        for about in self._runs:
            if about["id"] in failed and about["state"] == "stopped":
                code = failed[about["id"]]
                about = {**about, "trouble": about["trouble"] or f"its process ended with code {code}; see its log"}
            out.append(about)
        early = {i: code for i, code in failed.items() if i not in self.watch.runs}
        return out + [
            {"id": i, "title": i, "state": "damaged", "round": 0, "rounds": 0, "curves": {}, "version": 0,
             "trouble": f"it ended with code {code} before its first round; see its log"}
            for i, code in early.items()
        ]  # fmt: skip

    def about(self) -> dict[str, Any] | None:
        return self._about


def make_app(board: Board, token: str, port: int, hosts: tuple[str, ...] = ()) -> ASGIApp:
    """Return the web application of a board behind its guard."""
    loader = ChoiceLoader([PackageLoader("coterie.board"), PackageLoader("coterie.results.report")])
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(18)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; "
            "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        html = templates.get_template("board.html").render(
            nonce=nonce,
            methods=sorted(method_names()),
            curves=CURVES,
            federation=board.federation is not None,
        )
        return HTMLResponse(html, headers={"content-security-policy": policy})

    async def state(request: Request) -> Response:
        await board.refresh()
        return JSONResponse(json_values({"runs": board.runs(), "federation": board.about()}))

    async def stream(request: Request) -> Response:
        if board.readers >= _READERS:
            return PlainTextResponse(f"more than {_READERS} pages are open\n", 503)
        return StreamingResponse(_news(board, request), media_type="text/event-stream")

    async def details(request: Request) -> Response:
        await board.refresh()
        run = board.watch.runs.get(request.query_params.get("run", ""))
        if run is None:
            return _no_run()
        async with board.lock:
            return JSONResponse(json_values(await run_in_threadpool(run.details)))

    async def log(request: Request) -> Response:
        """Return the log of a run that was started here, or of a node; names are looked up, never made into a path."""
        node, run = request.query_params.get("node"), request.query_params.get("run", "")
        if node is not None:
            text = board.federation.log(node) if board.federation is not None else None
            return _no_run() if text is None else PlainTextResponse(text)
        if run not in board.watch.runs and run not in board.control.started:
            return _no_run()
        return PlainTextResponse(board.control.log(run))

    async def prometheus(request: Request) -> Response:
        await board.refresh()
        return PlainTextResponse(metrics.prometheus_text(board.runs(), board.about()), media_type=metrics.TYPE)

    async def act(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return PlainTextResponse("the request must be one small JSON object\n", 400)
        action = request.path_params["action"]
        if action not in ("start", "stop", "resume"):
            return PlainTextResponse("there is no such action\n", 404)
        try:
            if action == "start":
                return JSONResponse({"run": await run_in_threadpool(board.control.start, body)})
            await board.refresh()
            run = board.watch.runs.get(str(body.get("run", "")))
            if run is None:
                return _no_run()
            async with board.lock:
                await run_in_threadpool(run.refresh)
            await run_in_threadpool(board.control.stop if action == "stop" else board.control.resume, run)
        except CoterieError as e:
            return PlainTextResponse(f"{e}\n", 400)
        return JSONResponse({"run": run.id})

    async def check(request: Request) -> Response:
        """Answer if the guard accepts the token."""
        return JSONResponse({"token": "right"})

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/api/state", state),
            Route("/api/stream", stream),
            Route("/api/run", details),
            Route("/api/log", log),
            Route("/metrics", prometheus),
            Route("/api/token", check, methods=["POST"]),
            Route("/api/{action:str}", act, methods=["POST"]),
        ]
    )
    return Guard(app, (*LOOPBACK, *hosts), port, token)


def _no_run() -> Response:
    return PlainTextResponse("there is no such run or log\n", 404)


async def _body(request: Request) -> dict[str, Any] | None:
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > _LARGEST:
            return None
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


async def _news(board: Board, request: Request) -> AsyncIterator[str]:
    """Yield server-sent events: all runs first, then changed ones."""
    sent: dict[str, str] = {}
    federation, sent_at = "", 0.0
    where = json.dumps({"root": str(board.watch.root), "of": str(board.federation.path) if board.federation else ""})
    board.readers += 1
    try:
        while not board.closing and not await request.is_disconnected():
            await board.refresh()
            runs = {str(r["id"]): json.dumps(json_values(r)) for r in board.runs()}
            about = json.dumps(json_values(board.about()))
            changed = [text for i, text in runs.items() if sent.get(i) != text]
            gone = [i for i in sent if i not in runs]
            if changed or gone or about != federation or not sent_at:
                now = f'"now":{time.time():.3f}'
                news = f'{now},"runs":[{",".join(changed)}],"gone":{json.dumps(gone)},"federation":{about}'
                yield f"data: {{{where[1:-1]},{news}}}\n\n"
                sent_at = time.monotonic()
            elif time.monotonic() - sent_at > _STILL:
                yield ": still here\n\n"
                sent_at = time.monotonic()
            sent, federation = runs, about
            await asyncio.sleep(_EVERY)
    finally:
        board.readers -= 1


def open_board(root: Path, federation: Path | None = None, data_dir: Path | None = None) -> Board:
    """Return the board of the runs below `root` and of a federation, if one is given."""
    status = FederationStatus(federation) if federation is not None else None
    return Board(WatchedFolder(root), Control(root, data_dir), status)
