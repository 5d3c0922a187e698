"""A SuperLink whose control and runtime interfaces are closed; takes the options of `flower-superlink`.

Flower 1.41 serves its Fleet, Control and Runtime interfaces on one HTTPS port, and without Flower's commercial plugins
the Control interface knows no passwords: whoever reaches the port may register a node key or start a run, that is, send
code to stock SuperNodes. Here every path except the Fleet's (which asks for a registered node key) needs the
federation's control key in a header, and TLS is 1.3. Options are those of `flower-superlink`; the key's path comes in
COTERIE_CONTROL_KEY.
"""

import hmac
import os
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from coterie.runtimes.flower.processes import die_with_parent
from coterie.runtimes.flower.transport.http import HEADER, KEY

LARGEST_REQUEST = 8 * 2**20  # Flower sends chunks of 5 MB, and a body is held in memory before its sender is known
LARGEST_OF_OURS = 64 * 2**20  # the cloud announces the messages to all nodes in one request

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware: the Fleet interface and the health page are public, the rest is for the holder of the key."""

    def __init__(self, app: Any, key: str):
        self.app = app
        self.key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refused = self.refuse(scope)
        if refused is None:
            await self.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": refused, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def refuse(self, scope: Scope) -> int | None:
        """The status a request is refused with, if it is."""
        headers = dict(scope.get("headers", ()))
        path = scope.get("path", "")
        public = path.startswith("/v1/fleet/") or path == "/health"
        ours = hmac.compare_digest(headers.get(HEADER.encode(), b""), self.key)
        if scope["type"] != "http" or not (public or ours):
            return 403
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit():
            return 411  # without a length the limit could not be kept
        return 413 if int(length) > (LARGEST_OF_OURS if ours else LARGEST_REQUEST) else None


def main() -> None:
    die_with_parent()
    import uvicorn.config
    from flwr.supercore import sql_mixin
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    key = Path(os.environ[KEY]).read_text().strip()
    if len(key) < 32:
        sys.exit("the control key is empty or too short")
    # Payload chunks are rows of 5 MB: large pages make writing and deleting them many times faster, and while a large
    # model is deleted others must wait longer than Flower's 5 s.
    database: Any = sql_mixin
    ours = {"page_size": "65536", **dict(database.SQLITE_PRAGMAS), "busy_timeout": "120000"}
    database.SQLITE_PRAGMAS = tuple(ours.items())
    # The hook Flower keeps for its own add-ons; what it returns runs before everything else.
    extensions.get_middleware = lambda: (Middleware(Guard, key=key),)
    made = uvicorn.config.create_ssl_context

    def newest_tls(*args: Any, **more: Any) -> ssl.SSLContext:
        context = made(*args, **more)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    uvicorn.config.create_ssl_context = newest_tls
    flower_superlink()


if __name__ == "__main__":
    main()
