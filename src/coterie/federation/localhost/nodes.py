"""The devices and edges of a federation on this machine, as processes of their own, with keys and certificates.

Layout of the folder: certs/ (and edge-N/certs), devices/NAME (private state), logs/NAME.log.
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

from coterie.federation.identity import authority as c
from coterie.federation.identity.authority import Certs
from coterie.federation.localhost import processes
from coterie.federation.localhost.processes import Child
from coterie.models.per_client import is_assignment, parse_assignment
from coterie.models.registry import WITH_NORM
from coterie.storage.atomic import write_atomic

DEATHS = 3  # of one process, after which it is not started again


@dataclass
class LocalNodes:
    """`children` holds every process by name: edge-0, ..., device-0, ...."""

    folder: Path
    data: str
    method: str
    code: str | None  # the model, which may be package.module:name
    devices: int = 4
    edges: int = 0
    data_dir: Path | None = None
    late: tuple[int, ...] = ()  # devices that are not started at first
    stay: bool = False  # do devices and edges wait for another run when one has ended?
    keys: dict[str, Path] = field(default_factory=dict)  # of nodes whose key was changed
    children: dict[str, Child] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ports = {name: processes.free_port() for name in ("cloud", *self.edge_names)}

    @property
    def edge_names(self) -> list[str]:
        return [f"edge-{i}" for i in range(self.edges)]

    def above(self, device: int) -> str:
        """Where a device is attached: blocks of neighbours share an edge."""
        return "cloud" if not self.edges else f"edge-{device * self.edges // self.devices}"

    def certs(self, server: str) -> Certs:
        return Certs(self.folder / "certs" if server == "cloud" else self.folder / server / "certs")

    def certify(self) -> None:
        """Certificates of all servers and keys of all nodes, unless they are there already."""
        for server in ("cloud", *self.edge_names):
            if not self.certs(server).ca.is_file():
                c.init(self.certs(server).root, [])
        for name in self.edge_names:
            self._register("cloud", name, [f"device-{i}" for i in range(self.devices) if self.above(i) == name])
        for i in range(self.devices):
            self._register(self.above(i), f"device-{i}")

    def _register(self, server: str, name: str, devices: Sequence[str] = ()) -> None:
        """As an edge, if it has devices."""
        if name not in self.certs(server).nodes():
            c.add_node(self.certs(server).root, name, role="edge" if devices else "device", devices=devices)

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
        self.certify()
        for name in (*self.edge_names, *(f"device-{i}" for i in range(self.devices) if i not in self.late)):
            self.launch(name)

    def launch(self, name: str) -> Child:
        """Start one of the processes, or start it again after it ended."""
        argv = self.command(name)
        if name in self.children:
            self.children[name].kill()
            self.children[name].argv = argv
            return self.children[name].start()
        env = processes.bound({**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"})
        self.children[name] = Child(name, argv, self.folder / "logs" / f"{name}.log", env).start()
        return self.children[name]

    def command(self, name: str) -> list[str]:
        """The program of one of the processes and its arguments."""
        return [sys.executable, "-m", "coterie", *self.arguments(name)]

    def arguments(self, name: str) -> list[str]:
        """Of the command line of one of the processes."""
        kind, _, number = name.partition("-")
        return self._edge(name) if kind == "edge" else self._device(int(number))

    def _edge(self, name: str) -> list[str]:
        cloud = self.certs("cloud")
        up = ["--up", f"127.0.0.1:{self.ports['cloud']}", "--ca", str(cloud.ca), "--key", str(self._key("cloud", name))]
        down = ["--listen", f"127.0.0.1:{self.ports[name]}", "--certs", str(self.certs(name).root)]
        return [
            "edge",
            *up,
            *down,
            "--state",
            str(self.folder / name / "state"),
            *self._allow(),
            *self._stay(),
        ]

    def _device(self, i: int) -> list[str]:
        server = self.above(i)
        files = self.certs(server)
        up = ["--cloud", f"127.0.0.1:{self.ports[server]}", "--ca", str(files.ca)]
        who = ["--key", str(self._key(server, f"device-{i}")), "--client", str(i), "--state", str(self.state(i))]
        return ["join", *up, *who, "--data", self.data, *self._data_dir(), *self._allow(), *self._stay()]

    def _key(self, server: str, name: str) -> Path:
        return self.keys.get(name) or self.certs(server).key(name)

    def _stay(self) -> list[str]:
        return ["--stay"] if self.stay else []

    def _allow(self) -> list[str]:
        """On one machine the operator of all parties is who named method and model."""
        path = self.folder / "allow.toml"
        model = str(self.code)
        models = [name for _, name in parse_assignment(model)] if is_assignment(model) else [model]
        allowed = {"methods": [self.method], **({} if self.code in (None, WITH_NORM) else {"models": models})}
        write_atomic(path, "".join(f"{k} = {json.dumps(v)}\n" for k, v in allowed.items()).encode(), durable=False)
        return ["--allow", str(path)]

    def _data_dir(self) -> list[str]:
        return ["--data-dir", str(self.data_dir)] if self.data_dir else []

    def state(self, device: int) -> Path:
        return self.folder / "devices" / f"device-{device}"

    def stop(self) -> None:
        for child in reversed(self.children.values()):
            child.signal(15)
        for child in reversed(self.children.values()):
            child.stop()


@dataclass
class SupervisedNodes(LocalNodes):
    """Processes that are started again when they die."""

    stay: bool = True
    broken: str = ""  # why one of them cannot be kept alive
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        super().start()
        self._tender = threading.Thread(target=self._tend, name="parties", daemon=True)
        self._tender.start()

    def _tend(self) -> None:
        deaths = dict.fromkeys(self.children, 0)
        while not self._over.wait(0.5) and not self.broken:
            for name, child in self.children.items():
                if not child.alive:
                    deaths[name] += 1
                    if deaths[name] > DEATHS:
                        self.broken = f"{name} keeps ending; see {child.log}:\n{child.tail()}"
                        return
                    self.launch(name)

    def stop(self) -> None:
        self._over.set()
        if hasattr(self, "_tender"):
            self._tender.join(15)
        super().stop()


__all__ = ["LocalNodes", "SupervisedNodes"]
