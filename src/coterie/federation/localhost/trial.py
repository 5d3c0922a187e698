"""A whole federation on this machine, in real processes: for trying and for tests.

The folder is that of parties.py, with run/ for what the cloud writes: status.json, events.jsonl, wire.jsonl, ...
"""

import json
import time
from pathlib import Path
from typing import Any

from coterie.config import settings
from coterie.errors import CoterieError
from coterie.federation.localhost.nodes import LocalNodes


class LocalFederation(LocalNodes):
    """`with LocalFederation(folder, "fedrep", devices=4, given={"rounds": 3}) as federation: federation.wait(60)`"""

    def __init__(
        self,
        folder: Path,
        method: str,
        devices: int = 4,
        edges: int = 0,
        given: dict[str, Any] | None = None,  # settings of run, data and method
        deadline: float = 600.0,
        min_clients: int | None = None,  # default: all
        data_dir: Path | None = None,
        late: tuple[int, ...] = (),
        more: tuple[str, ...] = (),  # options of the cloud
    ):
        self.deadline, self.min_clients, self.more = deadline, min_clients, more
        self.given = {"clients": devices, **(given or {})}
        self.settings = settings(method=method, **self.given)  # a mistake is found before anything starts
        code = self.settings.model
        super().__init__(folder, self.settings.data, method, code, devices, edges, data_dir, late)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def start(self) -> None:
        self.certify()
        self.launch("cloud")
        super().start()

    def arguments(self, name: str) -> list[str]:
        return self._cloud() if name == "cloud" else super().arguments(name)

    def _cloud(self) -> list[str]:
        sets = [x for k, v in self.given.items() for x in ("--set", f"{k}={json.dumps(v)}")]
        where = ["--certs", str(self.certs("cloud").root), "--host", "127.0.0.1", "--port", str(self.ports["cloud"])]
        wait = ["--min-clients", str(self.min_clients or self.devices), "--deadline", str(self.deadline)]
        return ["serve", self.method, *where, *wait, *self.more, "--out", str(self.out), *self._data_dir(), *sets]

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

    def pids(self) -> dict[str, int]:
        """Process ids of the living processes, by name."""
        return {name: child.pid for name, child in self.children.items() if child.alive}


__all__ = ["LocalFederation"]
