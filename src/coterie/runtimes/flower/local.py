"""A whole federation on this machine, in real processes: for trying and for tests.

Layout of the folder: certs/ (and edge-N/certs), run/ (the cloud's: status.json, events.jsonl, wire.jsonl, ...),
devices/NAME (private state), logs/NAME.log. `children` holds every process by name: cloud, edge-0, ..., device-0, ...;
the SuperLinks are children of cloud and edges (status.json of theirs says their pid).
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from coterie.config import settings
from coterie.errors import CoterieError
from coterie.runtimes.flower import certs as c
from coterie.runtimes.flower import processes
from coterie.runtimes.flower.certs import Certs
from coterie.runtimes.flower.processes import Child


@dataclass
class Local:
    """`with Local(folder, "fedrep", devices=4, given={"rounds": 3}) as federation: federation.wait(60)`"""

    folder: Path
    method: str
    devices: int = 4
    edges: int = 0
    given: dict[str, Any] = field(default_factory=dict)  # settings of run, data and method
    deadline: float = 600.0
    min_clients: int | None = None  # default: all
    data_dir: Path | None = None
    late: tuple[int, ...] = ()  # devices that are not started at first
    children: dict[str, Child] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.given = {"clients": self.devices, **self.given}
        self.settings = settings(method=self.method, **self.given)  # a mistake is found before anything starts
        self.ports = {name: processes.free_port() for name in ("cloud", *self.edge_names)}

    @property
    def edge_names(self) -> list[str]:
        return [f"edge-{i}" for i in range(self.edges)]

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def above(self, device: int) -> str:
        """Where a device is attached: blocks of neighbours share an edge."""
        return "cloud" if not self.edges else f"edge-{device * self.edges // self.devices}"

    def certs(self, server: str) -> Certs:
        return Certs(self.folder / "certs" if server == "cloud" else self.folder / server / "certs")

    def __enter__(self) -> "Local":
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
        processes.need_flower()
        for server in ("cloud", *self.edge_names):
            if not self.certs(server).ca.is_file():
                c.init(self.certs(server).root, [])
        for name in self.edge_names:
            self._register("cloud", name)
        for i in range(self.devices):
            self._register(self.above(i), f"device-{i}")
        for name in ("cloud", *self.edge_names, *(f"device-{i}" for i in range(self.devices) if i not in self.late)):
            self.launch(name)

    def launch(self, name: str) -> Child:
        """Start one of the processes, or start it again after it ended."""
        if name in self.children:
            self.children[name].kill()
            self.children[name].start()
            return self.children[name]
        kind, _, number = name.partition("-")
        made = {"cloud": self._cloud, "edge": self._edge, "device": self._device}[kind](int(number or 0))
        env = processes.bound({**processes.flower_env(self.folder / "flwr"), "OMP_NUM_THREADS": "1"})
        argv = [sys.executable, "-m", "coterie", *made]
        self.children[name] = Child(name, argv, self.folder / "logs" / f"{name}.log", env).start()
        return self.children[name]

    def _register(self, server: str, name: str) -> None:
        if name not in self.certs(server).nodes():
            c.add_node(self.certs(server).root, name)

    def _cloud(self, _: int) -> list[str]:
        sets = [x for k, v in self.given.items() for x in ("--set", f"{k}={json.dumps(v)}")]
        where = ["--certs", str(self.certs("cloud").root), "--host", "127.0.0.1", "--port", str(self.ports["cloud"])]
        wait = ["--min-clients", str(self.min_clients or self.devices), "--deadline", str(self.deadline)]
        return ["serve", self.method, *where, *wait, "--out", str(self.out), *self._data_dir(), *sets]

    def _edge(self, i: int) -> list[str]:
        mine, cloud = f"edge-{i}", self.certs("cloud")
        up = ["--up", f"127.0.0.1:{self.ports['cloud']}", "--ca", str(cloud.ca), "--key", str(cloud.key(mine))]
        down = ["--listen", f"127.0.0.1:{self.ports[mine]}", "--certs", str(self.certs(mine).root)]
        return ["edge", *up, *down, "--state", str(self.folder / mine / "state")]

    def _device(self, i: int) -> list[str]:
        server = self.above(i)
        files = self.certs(server)
        up = ["--cloud", f"127.0.0.1:{self.ports[server]}", "--ca", str(files.ca)]
        who = ["--key", str(files.key(f"device-{i}")), "--client", str(i), "--state", str(self.state(i))]
        return ["join", *up, *who, "--data", self.settings.data, *self._data_dir()]

    def _data_dir(self) -> list[str]:
        return ["--data-dir", str(self.data_dir)] if self.data_dir else []

    def state(self, device: int) -> Path:
        return self.folder / "devices" / f"device-{device}"

    def model(self, device: int) -> Path:
        """The newest personal model of a device."""
        return self.state(device) / self.run / "model.safetensors"

    @property
    def run(self) -> str:
        return str(json.loads((self.out / "cloud.json").read_text())["run"])

    def status(self) -> dict[str, Any]:
        """The cloud's status.json; empty before there is one."""
        try:
            found: dict[str, Any] = json.loads((self.out / "status.json").read_text())
            return found
        except (OSError, ValueError):
            return {}

    def events(self) -> list[dict[str, Any]]:
        path = self.out / "events.jsonl"
        return [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")] if path.exists() else []

    def wait(self, seconds: float, round: int | None = None) -> None:
        """Until the cloud's program ended well, or until `round` is over."""
        until, cloud = time.monotonic() + seconds, self.children["cloud"]
        while round is None or len(self.events()) == 0 or self.events()[-1]["round"] < round:
            code = cloud.wait(0.05)
            if code == 0:
                return
            if code is not None or time.monotonic() > until:
                state = "did not end" if code is None else f"ended with {code}"
                raise CoterieError(f"the cloud {state}; see {cloud.log}:\n{cloud.tail()}")

    def stop(self) -> None:
        for child in reversed(self.children.values()):
            child.signal(15)
        for child in reversed(self.children.values()):
            child.stop()

    def pids(self) -> dict[str, int]:
        """Every process by name, SuperLinks included."""
        found = {name: child.pid for name, child in self.children.items() if child.alive}
        for name, pid in list(found.items()):
            for task in Path(f"/proc/{pid}/task").iterdir():  # a thread starts the SuperLink again
                for line in (task / "children").read_text().split():
                    if "transport.superlink" in Path(f"/proc/{line}/cmdline").read_text():
                        found[f"{name}-superlink"] = int(line)
        return found


__all__ = ["Local"]
