"""The server and the node of a federation, over gRPC with held streams."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.federation.identity.authority import Certs
from coterie.federation.transport.base import MAX_PAYLOAD, Answering, Bell

if TYPE_CHECKING:
    from coterie.federation.transport.grpc_server import GrpcLink

LINGER = 2.0  # seconds for which a node that leaves stays connected, so that its last answer is sent


@contextmanager
def listening(certs: Certs, host: str, port: int) -> "Iterator[GrpcLink]":
    """Start a server for the nodes registered in `certs` and yield the link to them."""
    from coterie.federation.transport.grpc_server import GrpcLink

    with GrpcLink(certs, host, port) as link:
        yield link


@dataclass
class Node:
    """Answers messages until stopped; survives restarts of the server and of the network."""

    address: str  # HOST:PORT of the cloud, or of an edge
    ca: Path
    key: Path
    handle: Answering
    largest: int = MAX_PAYLOAD  # bytes of one download
    patience: float = 30.0  # seconds a refused key is tried: not yet registered, or its last process died just now
    stopping: Bell = field(default_factory=Bell)
    connected: threading.Event = field(default_factory=threading.Event)

    def stop_on_signals(self) -> "Node":
        """SIGTERM and Ctrl-C end `run`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())
        return self

    def leave(self) -> None:
        """End `run` a moment later, when the last answer has gone."""
        self.stopping.set_after(LINGER)

    def run(self) -> None:
        """Blocks until `stopping` is set; raises CoterieError if the server refuses the key."""
        from coterie.federation.transport.grpc_node import GrpcNode

        given = (self.address, self.ca, self.key, self.handle, self.largest, self.patience, self.stopping)
        GrpcNode(*given, connected=self.connected).run()
