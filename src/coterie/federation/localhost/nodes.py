"""The devices and edges of a federation on this machine: one process each, with keys and certificates.

Layout of the folder: certs/ (and edge-N/certs), devices/NAME (private states), logs/NAME.log.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from coterie.federation.identity import authority
from coterie.federation.identity.authority import Certs
from coterie.federation.localhost import processes
from coterie.federation.localhost.processes import Child
from coterie.models.per_client import is_assignment, parse_client_models
from coterie.models.registry import WITH_NORM
from coterie.storage.atomic import write_atomic

_RESTARTS = 3  # restarts of one process


@dataclass
class LocalNodes:
    """Processes by name: edge-0, ..., device-0, ..."""

    folder: Path
    data: str
    method: str
    model_name: str | None  # may be package.module:name
    devices: int = 4
    edges: int = 0
    data_dir: Path | None = None
    late: tuple[int, ...] = ()  # devices that `start` does not start
    stay: bool = False  # devices and edges wait for the next run when one has ended
    keys: dict[str, Path] = field(default_factory=dict)  # private keys of nodes whose key was changed
    children: dict[str, Child] = field(default_factory=dict)
    places: Sequence[str] = ("cpu",)  # where the devices train, in turn

    def __post_init__(self) -> None:
        self.ports = {name: processes.free_port() for name in ("cloud", *self.edge_names)}

    @property
    def edge_names(self) -> list[str]:
        """Names of the edges."""
        return [f"edge-{i}" for i in range(self.edges)]

    def above(self, device: int) -> str:
        """Return the name of the server that a device is attached to; neighbouring devices share an edge."""
        return "cloud" if not self.edges else f"edge-{device * self.edges // self.devices}"

    def certs(self, server: str) -> Certs:
        """Return the certificates of the cloud or of an edge."""
        return Certs(self.folder / "certs" if server == "cloud" else self.folder / server / "certs")

    def certify(self) -> None:
        """Make certificates of all servers and keys of all nodes that do not exist yet."""
        for server in ("cloud", *self.edge_names):
            if not self.certs(server).ca.is_file():
                authority.init(self.certs(server).root, [])
        for name in self.edge_names:
            self._register("cloud", name, [f"device-{i}" for i in range(self.devices) if self.above(i) == name])
        for i in range(self.devices):
            self._register(self.above(i), f"device-{i}")

    def _register(self, server: str, name: str, devices: Sequence[str] = ()) -> None:
        """Register a node. A node with devices is an edge."""
        if name not in self.certs(server).nodes():
            authority.add_node(self.certs(server).root, name, role="edge" if devices else "device", devices=devices)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes, except those of late devices."""
        self.certify()
        for name in (*self.edge_names, *(f"device-{i}" for i in range(self.devices) if i not in self.late)):
            self.launch(name)

    def launch(self, name: str) -> Child:
        """Start a process, or start it again."""
        argv = self.command(name)
        if name in self.children:
            self.children[name].kill()
            self.children[name].argv = argv
            return self.children[name].start()
        env = processes.bound({**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"})
        self.children[name] = Child(name, argv, self.folder / "logs" / f"{name}.log", env).start()
        return self.children[name]

    def command(self, name: str) -> list[str]:
        """Return the program of a process with its arguments."""
        return [sys.executable, "-m", "coterie", *self.arguments(name)]

    def arguments(self, name: str) -> list[str]:
        """Return the arguments of `coterie` for a process."""
        kind, _, number = name.partition("-")
        return self._edge(name) if kind == "edge" else self._device(int(number))

    def _edge(self, name: str) -> list[str]:
        cloud = self.certs("cloud")
        up = ["--up", f"127.0.0.1:{self.ports['cloud']}", "--ca", str(cloud.ca), "--key", str(self._key("cloud", name))]
        down = ["--listen", f"127.0.0.1:{self.ports[name]}", "--certs", str(self.certs(name).root)]
        state = ["--state", str(self.folder / name / "state")]
        return ["edge", *up, *down, *state, *self._allow(), *self._stay()]

    def _device(self, i: int) -> list[str]:
        server = self.above(i)
        files = self.certs(server)
        up = ["--cloud", f"127.0.0.1:{self.ports[server]}", "--ca", str(files.ca)]
        own = ["--key", str(self._key(server, f"device-{i}")), "--client", str(i), "--state", str(self.state(i))]
        place = self.places[i % len(self.places)]
        own += [] if place == "cpu" else ["--device", place]
        return ["join", *up, *own, "--data", self.data, *self._data_dir(), *self._allow(), *self._stay()]

    def _key(self, server: str, name: str) -> Path:
        return self.keys.get(name) or self.certs(server).key(name)

    def _stay(self) -> list[str]:
        return ["--stay"] if self.stay else []

    def _allow(self) -> list[str]:
        """Allow the run's method and model: on one machine the operator of all nodes has chosen them."""
        path = self.folder / "allow.toml"
        model = str(self.model_name)
        models = [name for _, name in parse_client_models(model)] if is_assignment(model) else [model]
        allowed = {"methods": [self.method], **({} if self.model_name in (None, WITH_NORM) else {"models": models})}
        text = "".join(f"{k} = {json.dumps(v)}\n" for k, v in {**allowed, "reveal": "anything"}.items())
        write_atomic(path, text.encode(), durable=False)
        return ["--allow", str(path)]

    def _data_dir(self) -> list[str]:
        return ["--data-dir", str(self.data_dir)] if self.data_dir else []

    def state(self, device: int) -> Path:
        """Return the folder of a device's private states."""
        return self.folder / "devices" / f"device-{device}"

    def stop(self) -> None:
        """Stop all processes."""
        for child in reversed(self.children.values()):
            child.signal(15)
        for child in reversed(self.children.values()):
            child.stop()


@dataclass
class SupervisedNodes(LocalNodes):
    """Processes that are started again when they end."""

    stay: bool = True
    broken: str = ""  # why a process cannot be kept alive; empty: all can
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start all processes, and a thread that restarts those that end."""
        super().start()
        self._supervisor = threading.Thread(target=self._supervise, name="nodes", daemon=True)
        self._supervisor.start()

    def _supervise(self) -> None:
        ends = dict.fromkeys(self.children, 0)
        while not self._stopped.wait(0.5):
            for name, child in self.children.items():
                if child.alive:
                    continue
                ends[name] += 1
                if ends[name] > _RESTARTS:
                    self.broken = f"{name} keeps ending; see {child.log}:\n{child.tail()}"
                    return
                self.launch(name)

    def stop(self) -> None:
        """Stop the restarts, then all processes."""
        self._stopped.set()
        if hasattr(self, "_supervisor"):
            self._supervisor.join(15)
        super().stop()
