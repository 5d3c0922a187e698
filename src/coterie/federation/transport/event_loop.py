"""One asyncio event loop, in a thread of its own, for all gRPC servers and clients of this process.

gRPC requires that all its asyncio objects in a process use the same loop.
"""

import asyncio
import errno
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop; the first call starts its thread."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.set_exception_handler(log_loop_error)
            threading.Thread(target=_loop.run_forever, name="grpc", daemon=True).start()
        return _loop


def start_on_loop(work: Coroutine[Any, Any, T]) -> "Future[T]":
    """Start a coroutine on the loop and return its future."""
    return asyncio.run_coroutine_threadsafe(work, event_loop())


def run_on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop and wait in this thread for its result."""
    return start_on_loop(work).result()


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of a callback, except for two harmless ones.

    When its last server or client ends, gRPC closes a file descriptor that the loop still watches and leaves pending
    tasks behind.
    """
    error = context.get("exception")
    closed = isinstance(error, OSError) and error.errno == errno.EBADF
    if not closed and not str(context.get("message")).startswith("Task was destroyed"):
        loop.default_exception_handler(context)
