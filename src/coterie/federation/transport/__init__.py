"""Messages between the hosts of a federation, over gRPC: no other package imports gRPC.

A message is a kind, a round and bytes. This package moves messages between a server and its named nodes; the meaning
of the bytes and the seats of clients are decided elsewhere.

A server calls `listening`, and sends requests to all its nodes at once:

    with listening(certs, host, port) as server:
        answers, errors, traffic = server.send({"alice": own}, "train", round=3, deadline=600, shared=shared)

A node calls a function for each request:

    Node(address, ca, key, lambda kind, round, shared, own: answer).run()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from coterie.federation.identity.authority import Certs
from coterie.federation.transport.base import (
    MAX_PAYLOAD,
    AnswerFunction,
    Buffer,
    Cause,
    Exchange,
    Failure,
    LinkBytes,
    NodeLink,
    NodeReplies,
    NoPlanError,
    RefusedError,
    UnreachableError,
    WaitObserver,
)

if TYPE_CHECKING:
    from coterie.federation.transport.server import GrpcServer


@contextmanager
def listening(
    certs: Certs, host: str, port: int, on_wait: WaitObserver = lambda connected, asked: None
) -> "Iterator[GrpcServer]":
    """Run a server for the nodes registered in `certs`; gRPC is imported when it starts.

    While the server waits for answers, it calls `on_wait` every second.
    """
    from coterie.federation.transport.server import GrpcServer

    with GrpcServer(certs, host, port, on_wait) as server:
        yield server


__all__ = [
    "MAX_PAYLOAD",
    "AnswerFunction",
    "Buffer",
    "Cause",
    "Exchange",
    "Failure",
    "LinkBytes",
    "NoPlanError",
    "NodeLink",
    "NodeReplies",
    "RefusedError",
    "UnreachableError",
    "WaitObserver",
    "listening",
]  # fmt: skip
