"""A whole federation on this machine in real processes, for `coterie up` and for tests.

The folder has the layout of nodes.py, and run/ for the files of the cloud: status.json, events.jsonl, wire.jsonl, ...
"""

import json
import time
from pathlib import Path
from typing import Any

from coterie.config import settings
from coterie.errors import CoterieError
from coterie.federation.localhost.nodes import LocalNodes


class LocalFederation(LocalNodes):
    """A cloud, edges and devices.

    `with LocalFederation(folder, "fedrep", devices=4, given={"rounds": 3}) as federation: federation.wait(60)`
    """

    def __init__(
        self,
        folder: Path,
        method: str,
        devices: int = 4,
        edges: int = 0,
        given: dict[str, Any] | None = None,  # settings of the run, the data and the method
        deadline: float = 600.0,
        min_clients: int | None = None,  # None: all devices
        data_dir: Path | None = None,
        late: tuple[int, ...] = (),
        more: tuple[str, ...] = (),  # further options of the cloud
    ):
        self.deadline, self.min_clients, self.more = deadline, min_clients, more
        self.given = {"clients": devices, **(given or {})}
        self.settings = settings(method=method, **self.given)  # finds mistakes before anything starts
        model = self.settings.model
        super().__init__(folder, self.settings.data, method, model, devices, edges, data_dir, late)

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return self.folder / "run"

    def start(self) -> None:
        """Start the cloud, then the other processes."""
        self.certify()
        self.launch("cloud")
        super().start()

    def arguments(self, name: str) -> list[str]:
        """Return the arguments of `coterie` for a process."""
        return self._cloud() if name == "cloud" else super().arguments(name)

    def _cloud(self) -> list[str]:
        sets = [x for k, v in self.given.items() for x in ("--set", f"{k}={json.dumps(v)}")]
        where = ["--certs", str(self.certs("cloud").root), "--host", "127.0.0.1", "--port", str(self.ports["cloud"])]
        wait = ["--min-clients", str(self.min_clients or self.devices), "--deadline", str(self.deadline)]
        return ["serve", self.method, *where, *wait, *self.more, "--out", str(self.out), *self._data_dir(), *sets]

    def model(self, device: int) -> Path:
        """Return the file of a device's personal model."""
        return self.state(device) / self.run / "model.safetensors"

    @property
    def run(self) -> str:
        """The id of the run."""
        return str(json.loads((self.out / "cloud.json").read_text())["run"])

    def status(self) -> dict[str, Any]:
        """Return the content of status.json; empty before the cloud has written it."""
        try:
            status: dict[str, Any] = json.loads((self.out / "status.json").read_text())
            return status
        except (OSError, ValueError):
            return {}

    def events(self) -> list[dict[str, Any]]:
        """Return the complete lines of events.jsonl."""
        path = self.out / "events.jsonl"
        return [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")] if path.exists() else []

    def wait(self, seconds: float, round: int | None = None) -> None:
        """Wait until the cloud's program has ended, or until `round` is over.

        Raises CoterieError if it ends with an error, or does not end within `seconds`.
        """
        until, cloud = time.monotonic() + seconds, self.children["cloud"]
        while round is None or len(self.events()) == 0 or self.events()[-1]["round"] < round:
            code = cloud.wait(0.05)
            if code == 0:
                return
            if code is not None or time.monotonic() > until:
                state = "did not end" if code is None else f"ended with {code}"
                raise CoterieError(f"the cloud {state}; see {cloud.log}:\n{cloud.tail()}")

    def pids(self) -> dict[str, int]:
        """Return the ids of the running processes by name."""
        return {name: child.pid for name, child in self.children.items() if child.alive}
