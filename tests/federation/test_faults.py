"""Processes that die, lose their connection or run out of disk space: the run ends, and no state is mixed up.

After each fault the whole run is computed again in one process without the clients that its events call failed. Server
state and personal models must agree, which they cannot if a state was lost, used twice or given to the wrong client.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")


from coterie.federation.localhost import processes
from coterie.federation.localhost.trial import LocalFederation
from support.replayed import same_as_replay

pytestmark = pytest.mark.long

ROUNDS = 6
GIVEN: dict[str, Any] = {
    "data": "digits", "subset": 600, "model": "mlp", "partition": "dirichlet(0.5)", "join": 1.0,
    "epochs": 200, "lr": 0.001, "rounds": ROUNDS, "eval_every": ROUNDS, "watch": False, "final_trained": False,
}  # fmt: skip
PATIENCE = 300.0  # seconds for a whole run on a busy machine


def federation(folder: Path, edges: int = 0, **more: Any) -> LocalFederation:
    given = {**GIVEN, **more}
    return LocalFederation(folder / "federation", "fedrep", 4, edges, given, deadline=60.0, min_clients=3)


def failures(local: LocalFederation) -> dict[int, list[int]]:
    return {e["round"]: e["failed"] for e in local.events() if e["failed"]}


def test_a_device_killed_during_a_round_is_excluded_and_returns_with_its_state(tmp_path: Path) -> None:
    with federation(tmp_path) as f:
        f.wait(PATIENCE, round=2)
        os.kill(f.pids()["device-1"], signal.SIGSTOP)  # it gets its request and never answers
        time.sleep(1)
        f.children["device-1"].kill()
        f.wait(PATIENCE, round=4)
        f.launch("device-1")
        f.wait(PATIENCE)
    assert failures(f), "the dead device is not among the failed clients"
    assert all(failed == [1] for failed in failures(f).values())
    assert any("device-1" in reason for e in f.events() for reason in e.get("reasons", {}).values())
    same_as_replay(f, tmp_path / "replay")


def test_a_killed_cloud_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    f = federation(tmp_path)
    f.min_clients = 4  # the resumed cloud waits until every device has returned, also on a busy machine
    with f:
        f.wait(PATIENCE, round=2)
        time.sleep(0.2)  # during round 3
        f.children["cloud"].kill()
        f.launch("cloud")
        f.wait(PATIENCE)
    same_as_replay(f, tmp_path / "replay")
    assert not failures(f), "a device was excluded although all were connected"


class Proxy:
    """Forwards connections to a port of this machine until `cut` is called."""

    def __init__(self, target: int):
        self.target, self.open = target, True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self.listener.accept()
                if not self.open:
                    here.close()
                    continue
                try:
                    there = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    here.close()
                    continue
                self.pairs += [here, there]
                for a, b in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := a.recv(65536):
                b.sendall(chunk)
        for s in (a, b):
            with contextlib.suppress(OSError):
                s.close()

    def cut(self) -> None:
        self.open = False
        for s in self.pairs:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        self.pairs.clear()

    def close(self) -> None:
        self.cut()
        self.listener.close()


def test_a_device_disconnected_for_two_rounds_returns_with_its_state(tmp_path: Path) -> None:
    f = federation(tmp_path)
    proxy = Proxy(f.ports["cloud"])
    straight = f._device

    def through_proxy(i: int) -> list[str]:
        argv = straight(i)
        return [a.replace(str(f.ports["cloud"]), str(proxy.port)) for a in argv] if i == 2 else argv

    f._device = through_proxy  # type: ignore[method-assign]
    try:
        with f:
            f.wait(PATIENCE, round=1)
            proxy.cut()
            f.wait(PATIENCE, round=4)
            proxy.open = True
            f.wait(PATIENCE)
    finally:
        proxy.close()
    gone = failures(f)
    assert len(gone) >= 2 and all(failed == [2] for failed in gone.values())
    same_as_replay(f, tmp_path / "replay")


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir(parents=True)
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_device_with_a_full_disk_is_excluded_until_there_is_space(tmp_path: Path) -> None:
    f = federation(tmp_path)
    with small_disk(f.state(3), "8m") as disk, f:
        f.wait(PATIENCE, round=1)
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as out:
            while True:
                out.write(b"\0" * 4096)
        f.wait(PATIENCE, round=4)
        filler.unlink()
        f.wait(PATIENCE)
        gone = failures(f)
        assert gone and all(failed == [3] for failed in gone.values())
        reasons = [reason for e in f.events() for reason in e.get("reasons", {}).values()]
        assert any("device-3" in r and "No space left" in r for r in reasons), reasons
        same_as_replay(f, tmp_path / "replay")


def test_a_killed_edge_is_excluded_with_its_devices_and_returns(tmp_path: Path) -> None:
    f = federation(tmp_path, edges=2)
    f.min_clients = 2
    with f:
        f.wait(PATIENCE, round=2)
        f.children["edge-0"].kill()
        f.wait(PATIENCE, round=4)
        f.launch("edge-0")
        f.wait(PATIENCE)
    # two clients are enough to start, so the devices of the other edge may miss the first rounds
    gone = {t: failed for t, failed in failures(f).items() if t > 2}
    assert gone and all(set(failed) <= {0, 1} for failed in gone.values())
    same_as_replay(f, tmp_path / "replay")


def test_all_started_processes_are_stopped(tmp_path: Path) -> None:
    with federation(tmp_path, edges=2, rounds=2, eval_every=2) as f:
        f.wait(PATIENCE, round=1)
        pids = f.pids()
        assert {"cloud", "edge-0", "device-3"} <= set(pids)
    time.sleep(0.5)
    assert not [name for name, pid in pids.items() if Path(f"/proc/{pid}/cmdline").exists()]
    assert not processes._running or not any(c.alive for c in f.children.values())
