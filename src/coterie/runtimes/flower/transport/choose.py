"""A server and a node, over whichever transport."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.runtimes.flower.certs import Certs
from coterie.runtimes.flower.transport.base import LARGEST, Answering, address

if TYPE_CHECKING:
    from coterie.runtimes.flower.transport.link import FlowerLink


@contextmanager
def listening(certs: Certs, state: Path, host: str, port: int) -> "Iterator[FlowerLink]":
    """A server for the nodes of `certs`, and the link to who connects; what it keeps on disk is under `state`."""
    from coterie.runtimes.flower.transport.link import FlowerLink
    from coterie.runtimes.flower.transport.superlink import superlink

    with superlink(certs, state, host, port), FlowerLink(address(host, port), certs) as link:
        yield link


@dataclass
class Node:
    """Answers messages until stopped; survives restarts of the server and of the network."""

    address: str  # HOST:PORT of the cloud, or of an edge
    ca: Path
    key: Path
    handle: Answering
    largest: int = LARGEST  # bytes of one download
    patience: float = 30.0  # seconds a refused key is tried: not yet registered, or its last process died just now
    stopping: threading.Event = field(default_factory=threading.Event)
    connected: threading.Event = field(default_factory=threading.Event)

    def stop_on_signals(self) -> "Node":
        """SIGTERM and Ctrl-C end `run`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())
        return self

    def run(self) -> None:
        """Blocks until `stopping` is set; raises CoterieError if the server cannot be trusted or refuses the key."""
        from coterie.runtimes.flower.transport.node import FlowerNode

        FlowerNode(
            self.address, self.ca, self.key, self.handle, largest=self.largest, patience=self.patience,
            stopping=self.stopping, connected=self.connected,
        ).run()  # fmt: skip
