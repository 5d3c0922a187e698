"""A server and a node, over either transport: gRPC with held streams, or Flower's SuperLink.

Who listens decides which it is. A node finds out: a server of gRPC says so in its TLS handshake.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import CoterieError
from coterie.runtimes.flower.certs import Certs
from coterie.runtimes.flower.transport.base import LARGEST, Answering, Bell, OtherTransportError, address

if TYPE_CHECKING:
    from coterie.runtimes.flower.transport.grpc_link import GrpcLink
    from coterie.runtimes.flower.transport.link import FlowerLink

TRANSPORTS = ("grpc", "flower")  # the first is the default
LINGER = 2.0  # seconds in which the last answer of a node goes


@contextmanager
def listening(
    certs: Certs, state: Path, host: str, port: int, transport: str = TRANSPORTS[0]
) -> "Iterator[GrpcLink | FlowerLink]":
    """A server for the nodes of `certs`, and the link to who connects; what it keeps on disk is under `state`."""
    if transport == "grpc":
        from coterie.runtimes.flower.transport.grpc_link import GrpcLink

        with GrpcLink(certs, host, port) as held:
            yield held
    elif transport == "flower":
        from coterie.runtimes.flower.transport.link import FlowerLink
        from coterie.runtimes.flower.transport.superlink import superlink

        with superlink(certs, state, host, port), FlowerLink(address(host, port), certs) as link:
            yield link
    else:
        raise CoterieError(f'transport "{transport}" must be {" or ".join(TRANSPORTS)}')


@dataclass
class Node:
    """Answers messages until stopped; survives restarts of the server and of the network."""

    address: str  # HOST:PORT of the cloud, or of an edge
    ca: Path
    key: Path
    handle: Answering
    largest: int = LARGEST  # bytes of one download
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
        from coterie.runtimes.flower.transport.grpc_node import GrpcNode

        given = (self.address, self.ca, self.key, self.handle, self.largest, self.patience, self.stopping)
        try:
            GrpcNode(*given, connected=self.connected).run()
        except OtherTransportError:
            from coterie.runtimes.flower.transport.node import FlowerNode

            FlowerNode(*given, connected=self.connected).run()
