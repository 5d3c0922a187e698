"""Processes that die, lose their connection or run out of disk space: the run ends, and no state is mixed up.

After each fault the whole run is computed again in one process without the clients that its events call failed. Server
state and personal models must agree, which they cannot if a state was lost, used twice or given to the wrong client.
"""

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")


from coterie.federation.localhost import processes
from support.paced import Paced
from support.replayed import same_as_replay

pytestmark = pytest.mark.long

DEADLINE = 60.0  # seconds for an answer, on a busy machine


def failures(f: Paced, since: int) -> list[list[int]]:
    """Return the clients that failed, by round, without rounds up to `since` and those in which none failed."""
    return [e["failed"] for e in f.events() if e["round"] > since and e["failed"]]


def test_a_device_killed_during_a_round_is_excluded_and_returns_with_its_state(tmp_path: Path) -> None:
    f = Paced(tmp_path, devices=4, min_clients=3, deadline=DEADLINE)
    f.modes["device-1"] = "slow"
    with f:
        began = f.until_failed()
        f.until_busy("device-1")
        f.children["device-1"].kill()
        f.until_failed(1)
        assert "device-1" in f.reason(1)
        f.launch("device-1")
        f.until_failed()
        f.finish()
        assert set(map(tuple, failures(f, began))) == {(1,)}
        same_as_replay(f, tmp_path / "replay")


def test_a_killed_cloud_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    with Paced(tmp_path, devices=4, deadline=DEADLINE) as f:
        f.until_failed()
        f.until_busy("device-0")
        f.children["cloud"].kill()
        f.launch("cloud")
        f.until_failed()
        f.finish()
        assert not failures(f, 0), "a device was excluded although all were connected"
        same_as_replay(f, tmp_path / "replay")


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
    f = Paced(tmp_path, devices=4, min_clients=3, deadline=DEADLINE)
    proxy = Proxy(f.ports["cloud"])
    straight = f._device

    def through_proxy(i: int) -> list[str]:
        argv = straight(i)
        return [a.replace(str(f.ports["cloud"]), str(proxy.port)) for a in argv] if i == 2 else argv

    f._device = through_proxy  # type: ignore[method-assign]
    try:
        with f:
            began = f.until_failed()
            proxy.cut()
            f.until_failed(2)
            f.until_failed(2)
            proxy.open = True
            f.until_failed()
            f.finish()
            assert set(map(tuple, failures(f, began))) == {(2,)}
            same_as_replay(f, tmp_path / "replay")
    finally:
        proxy.close()


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
    f = Paced(tmp_path, devices=4, min_clients=3, deadline=DEADLINE)
    with small_disk(f.state(3), "8m") as disk, f:
        began = f.until_failed()
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as out:
            while True:
                out.write(b"\0" * 4096)
        f.until_failed(3)
        assert "device-3" in f.reason(3) and "No space left" in f.reason(3)
        filler.unlink()
        f.until_failed()
        f.finish()
        assert set(map(tuple, failures(f, began))) == {(3,)}
        same_as_replay(f, tmp_path / "replay")


def test_a_killed_edge_is_excluded_with_its_devices_and_returns(tmp_path: Path) -> None:
    with Paced(tmp_path, devices=4, edges=2, min_clients=2, deadline=DEADLINE) as f:
        began = f.until_failed()
        f.children["edge-1"].kill()
        f.until_failed(2, 3)
        f.launch("edge-1")
        f.until_failed()
        f.finish()
        assert all(set(failed) <= {2, 3} for failed in failures(f, began))
        same_as_replay(f, tmp_path / "replay")


def test_all_started_processes_are_stopped(tmp_path: Path) -> None:
    with Paced(tmp_path, devices=4, edges=2) as f:
        f.until(f.events, "a round")
        pids = f.pids()
        assert {"cloud", "edge-0", "device-3"} <= set(pids)
    end = time.monotonic() + 60
    while left := [name for name, pid in pids.items() if Path(f"/proc/{pid}/cmdline").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert not processes._running or not any(c.alive for c in f.children.values())
