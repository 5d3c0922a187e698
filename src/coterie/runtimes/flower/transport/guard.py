"""A SuperLink whose control and runtime interfaces are closed; takes the options of `flower-superlink`.

Flower 1.41 serves its Fleet, Control and Runtime interfaces on one HTTPS port, and without Flower's commercial plugins
the Control interface knows no passwords: whoever reaches the port may register a node key or start a run, that is, send
code to stock SuperNodes. Here every path except the Fleet's (which asks for a registered node key) needs the
federation's control key in a header, and TLS is 1.3. limits.py bounds what others can take of memory and disk. Options
are those of `flower-superlink`; the key's path comes in COTERIE_CONTROL_KEY.
"""

import contextlib
import hmac
import os
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Container, MutableMapping
from pathlib import Path
from typing import Any

from coterie.runtimes.flower.certs import Certs
from coterie.runtimes.flower.processes import die_with_parent
from coterie.runtimes.flower.transport.http import HEADER, KEY
from coterie.runtimes.flower.transport.limits import (
    ALLOWED,
    LARGEST_OF_OURS,
    LARGEST_REQUEST,
    Budget,
    Known,
    bounded,
    in_time,
    signed,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


WHO = "coterie.key"  # entry of a scope: the registered key that signed the request


class Guard:
    """ASGI middleware: the Fleet interface is for registered keys, the rest for the holder of the control key."""

    def __init__(self, app: Any, key: str, known: Container[bytes], verify: Callable[[bytes, bytes, bytes], bool]):
        self.app, self.key = app, key.encode()
        self.known, self.verify = known, verify
        self.budget = Budget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refused = self.refuse(scope)
        headers = dict(scope.get("headers", ()))
        length = int(headers.get(b"content-length", b"0")) if refused is None else 0
        node: bytes | None = scope.get(WHO)
        if refused is None and node is not None:
            refused = self.budget.refuse(node, length, _pushes(scope))
        if refused is not None:
            ends = [(b"content-length", b"0"), (b"connection", b"close")]  # the body is not read
            await send({"type": "http.response.start", "status": refused, "headers": ends})
            await send({"type": "http.response.body", "body": b""})
            return
        if node is None:
            allowed = headers.get(ALLOWED.encode(), b"")
            if allowed.isdigit() and scope.get("path") == "/v1/runtime/push-messages":
                self.budget.asked(int(allowed))
            await self.app(scope, receive, send)
            return
        self.budget.begin(node, length, _pushes(scope))
        try:
            await self.app(scope, in_time(receive, length), send)
        finally:
            self.budget.end(node, length)

    def refuse(self, scope: Scope) -> int | None:
        """The status a request is refused with, if it is; decided before its body is read."""
        headers = dict(scope.get("headers", ()))
        ours = hmac.compare_digest(headers.get(HEADER.encode(), b""), self.key)
        if scope["type"] != "http" or not (_fleet(scope) or scope.get("path") == "/health" or ours):
            return 403
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit():
            return 411  # without a length the limit could not be kept
        if _fleet(scope):
            key = signed(headers, self.verify)
            if key is None or key not in self.known:
                return 401
            scope[WHO] = key
        elif not ours and int(length):
            return 413
        return 413 if int(length) > (LARGEST_OF_OURS if ours else LARGEST_REQUEST) else None


def _fleet(scope: Scope) -> bool:
    return str(scope.get("path", "")).startswith("/v1/fleet/")


def _pushes(scope: Scope) -> bool:
    return str(scope.get("path", "")).startswith("/v1/fleet/push-")


def free_removed_keys(state: Any) -> None:
    """Let the key of a removed node be registered again. Flower 1.41 keeps it, and keys are unique in its database.

    `state` is Flower's class of the database; the row of the removed node stays, without its key.
    """
    from sqlalchemy import text

    create = state.create_node

    def create_node(self: Any, owner_aid: str, owner_name: str, public_key: bytes, *args: Any, **more: Any) -> Any:
        with self.session() as session:
            freed = "UPDATE node SET public_key = NULL WHERE public_key = :key AND status = 'unregistered'"
            session.execute(text(freed), {"key": public_key})
        return create(self, owner_aid, owner_name, public_key, *args, **more)

    state.create_node = create_node


def follow(context: ssl.SSLContext, certificate: Path, key: Path, every: float = 1.0) -> threading.Thread:
    """Use the certificate that lies in these files now, for every connection from now on; those that are open stay."""

    def stamp() -> tuple[int, ...]:
        return tuple(n for path in (certificate, key) for n in (path.stat().st_mtime_ns, path.stat().st_ino))

    def watch() -> None:
        loaded = stamp()
        while True:
            time.sleep(every)
            with contextlib.suppress(OSError):  # (an SSLError is one) half of a new pair: what is loaded stays
                found = stamp()
                if found != loaded:
                    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
                    context.load_cert_chain(certificate, key)
                    loaded = found

    watcher = threading.Thread(target=watch, name="certificate-watch", daemon=True)
    watcher.start()
    return watcher


def main() -> None:
    die_with_parent()
    import uvicorn
    import uvicorn.config
    from flwr.server.superlink.linkstate import SqlLinkState
    from flwr.supercore import sql_mixin
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    key = Path(os.environ[KEY]).read_text().strip()
    if len(key) < 32:
        sys.exit("the control key is empty or too short")
    # Payload chunks are rows of 5 MB: large pages make writing and deleting them many times faster, and while a large
    # model is deleted others must wait longer than Flower's 5 s.
    database: Any = sql_mixin
    ours = {"page_size": "65536", **dict(database.SQLITE_PRAGMAS), "busy_timeout": "120000"}
    database.SQLITE_PRAGMAS = tuple(ours.items())
    free_removed_keys(SqlLinkState)
    # The hook Flower keeps for its own add-ons; what it returns runs before everything else.
    known = Known(Certs(Path(os.environ[KEY]).parent).accepted)

    def verify(public: bytes, text: bytes, signature: bytes) -> bool:
        return verify_signature(bytes_to_public_key(public), text, signature)

    extensions.get_middleware = lambda: (Middleware(Guard, key=key, known=known, verify=verify),)
    run = uvicorn.run

    def run_bounded(*args: Any, **more: Any) -> None:
        run(*args, http=bounded(AutoHTTPProtocol), **more)

    uvicorn.run = run_bounded
    made = uvicorn.config.create_ssl_context

    def newest_tls(*args: Any, **more: Any) -> ssl.SSLContext:
        context = made(*args, **more)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        option = dict(zip(sys.argv, sys.argv[1:], strict=False))
        follow(context, Path(option["--ssl-certfile"]), Path(option["--ssl-keyfile"]))
        return context

    uvicorn.config.create_ssl_context = newest_tls
    flower_superlink()


if __name__ == "__main__":
    main()
