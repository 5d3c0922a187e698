"""Access control: all requests are checked by Host and Origin, and all but that for the empty page by the token."""

import asyncio
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN = "x-coterie-token"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PAUSE = 0.5  # seconds before a request with a wrong token is answered
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Refuses requests that other web pages make a browser send, also by DNS rebinding.

    The Host must be a known name of the board, and a given Origin must match it. Runs are shown and changed only for
    requests with the token, because the folders may be closed to other users of this machine. The page itself has no
    data. A wrong token delays its own answer only, so it cannot keep the owner out.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], port: int, token: str):
        self.app, self.token = app, token.encode()
        self.hosts = {h.lower() for name in hosts for h in (name, f"{name}:{port}")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                have = {k.lower() for k, _ in message["headers"]}
                extra = [(k.encode(), v.encode()) for k, v in _HEADERS.items() if k.encode() not in have]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        refused = self.refusal(scope["method"], str(scope["path"]), Headers(scope=scope))
        if refused:
            if refused[0] == 401:
                await asyncio.sleep(_PAUSE)
            await PlainTextResponse(refused[1] + "\n", refused[0])(scope, receive, sealed)
        else:
            await self.app(scope, receive, sealed)

    def refusal(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return status and reason if the request is refused."""
        if len(headers.getlist("host")) != 1 or headers["host"].lower() not in self.hosts:
            return 421, "this board is not known by that name; see --allow-host"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"{s}://{h}" for h in self.hosts for s in ("http", "https")}:
            return 403, "requests from other pages are refused"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return 403, "requests from other pages are refused"
        if method not in ("GET", "HEAD", "POST"):
            return 405, "only GET and POST"
        if path == "/" and method != "POST":
            return None
        given = headers.get(TOKEN) or headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self.token):
            return 401, "this needs the token that `coterie board` printed when it started"
        return None
