"""A SuperLink and SuperNodes as processes on this machine, and `flwr run` of a project on them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.federation.localhost.processes import free_port

BIN = Path(sys.executable).parent


class FlowerDeployment:
    """An unmodified Flower deployment without TLS; `with FlowerDeployment(folder, nodes=4) as flower: ...`."""

    def __init__(self, folder: Path, nodes: int, node_config: str = ""):
        if not (BIN / "flower-superlink").is_file():
            pytest.skip("needs Flower: pip install 'coterie[flower]'")
        self.folder, self.nodes, self.node_config = folder, nodes, node_config
        self.home, self.port = folder / "flwr-home", free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            **os.environ, "FLWR_HOME": str(self.home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def __enter__(self) -> "FlowerDeployment":
        self.home.mkdir(parents=True)
        connection = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
        (self.home / "config.toml").write_text(connection + "insecure = true\n")
        host = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        self._start("superlink", "flower-superlink", *host, "--disable-runtime-dependency-installation")
        for i in range(self.nodes):
            self.start_node(i)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / program, *arguments], stdout=log, stderr=log, env=self.env, cwd=self.folder
            )

    def start_node(self, i: int) -> None:
        """Start SuperNode `i`, which is client `i`, or start it again."""
        config = f'coterie-state="{self.state(i)}" coterie-client={i} coterie-name="ward-{i}" {self.node_config}'
        where = ["--insecure", "--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port())]
        self._start(f"node-{i}", "flower-supernode", *where, "--node-config", config)

    def kill_node(self, i: int) -> None:
        self.processes[f"node-{i}"].kill()
        self.processes[f"node-{i}"].wait()

    def state(self, i: int) -> Path:
        return self.folder / "states" / str(i)

    def run(self, project: Path) -> None:
        """Start a project."""
        for attempt in range(20):
            done = self._flwr("run", str(project), "--format", "json")
            if '"success": true' in done:
                return
            time.sleep(1 + attempt / 4)  # the SuperLink is not ready
        raise AssertionError(done)

    def wait(self, out: Path, seconds: float, round: int | None = None) -> None:
        """Wait until the run in a folder has ended well, or until `round` is over."""
        until, path = time.monotonic() + seconds, out / "status.json"
        while True:
            status = json.loads(path.read_text()) if path.is_file() else {"state": "", "round": 0}
            if status["state"] == "ended" or (round is not None and status["round"] >= round):
                return
            log = (self.folder / "superlink.log").read_text()[-4000:]
            assert status["state"] != "failed" and time.monotonic() < until, f"{status}\n{log}"
            time.sleep(1)

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run([BIN / "flwr", *arguments], env=self.env, cwd=self.folder, capture_output=True, text=True)
        return done.stdout or done.stderr
