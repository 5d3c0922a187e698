"""Measure how many devices a cloud can serve, with fake devices that speak the real protocol and do not train.

    python benchmarks/federation_load.py [--devices 4 16 64 100 256] [--edges 0 4] [--rounds 6] [--out FILE] [--real]
                                         [--profile DIR]

The cloud is `coterie serve` and the edges are `coterie edge`, as in any federation. Each fake device has a key and a
TLS connection of its own; a hundred share a process. They answer every job at once with an upload of the right
shape (FedAvg, LeNet-5 with about 60,000 parameters). For each size, this prints the median seconds of a round, the CPU
seconds of each kind of process per round, and the peak of resident memory. The median excludes the first round, and the
last one, which evaluates all clients.

With `--real` the devices are `coterie join` processes that train on a file of twenty items each. This shows whether
they all start and whether the run ends. Each takes about 160 MB, mostly for PyTorch, and two CPU seconds to start.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.engine import codec
from coterie.engine.messages import Score, ScoreAnswer, TrainAnswer, TrainRequest, check_message
from coterie.errors import CoterieError
from coterie.federation.localhost import processes
from coterie.federation.localhost.nodes import LocalNodes
from coterie.federation.localhost.processes import Child
from coterie.federation.protocol.messages import Common, DeviceJob, Hello, with_common
from coterie.federation.transport.node import Node

SAMPLES, CLASSES, SHAPE = 100, 10, "1,32,32"
RESERVE = 2 * 2**30  # bytes of memory that are left to other programs
EACH = 100  # fake devices in one process


# ---- fake devices ----------------------------------------------------------------------------------------------------
def answer(client: int, kind: str, shared: memoryview | None, own: memoryview) -> memoryview:
    """Answer a message at once, without training."""
    message = codec.unpack(own)
    if kind == "hello":
        return codec.pack(Hello(client, SAMPLES))
    common = Common() if shared is None else check_message(codec.unpack(shared), Common)
    request = with_common(common, check_message(message, DeviceJob)).request
    if isinstance(request, TrainRequest):
        upload = {k: v.clone() for k, v in request.download.items()}
        return codec.pack(TrainAnswer(client, upload, {}, SAMPLES, 1, 0.5))
    ten = torch.full((CLASSES,), SAMPLES // CLASSES)
    return codec.pack(ScoreAnswer(client, {"personal/test": Score({"hits": ten // 2, "total": ten}, 50.0)}, SAMPLES))


def run_fake_devices(devices: list[tuple[int, str, Path, Path]]) -> None:
    """Be these devices, given as client, address, authority and key, until SIGTERM or Ctrl-C."""
    processes.die_with_parent()
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    nodes = []
    for client, address, ca, key in devices:
        nodes.append(Node(address, ca, key, lambda k, r, s, o, client=client: answer(client, k, s, o)))  # type: ignore[misc]
        threading.Thread(target=nodes[-1].run, daemon=True).start()
        time.sleep(0.02)
    stopped.wait()
    for node in nodes:
        node.stopping.set()
    time.sleep(0.5)
    os._exit(0)


def own_data(folder: Path, i: int) -> Path:
    """Write twenty images of noise with labels for a device."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(i)
    x = draw.normal(size=(2 * CLASSES, *map(int, SHAPE.split(",")))).astype(np.float32)
    np.savez(folder / f"{i}.npz", x=x, y=np.arange(2 * CLASSES) % CLASSES)
    return folder / f"{i}.npz"


def free_memory() -> int:
    """Return the bytes of memory that are available."""
    sizes = dict(x.split(":") for x in Path("/proc/meminfo").read_text().splitlines())
    return int(sizes["MemAvailable"].split()[0]) * 1024


# ---- a federation ----------------------------------------------------------------------------------------------------
@dataclass
class Load(LocalNodes):
    """A cloud, edges, and fake or real devices."""

    rounds: int = 6
    real: bool = False
    stagger: float = 0.0

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def start(self) -> None:
        self.certify()
        self.launch("cloud")
        time.sleep(3.0)
        for name in self.edge_names:
            self.launch(name)
        time.sleep(3.0 if self.edges else 0.0)
        if self.real:
            for i in range(self.devices):
                if free_memory() < RESERVE:
                    raise CoterieError(f"less than {RESERVE / 2**30:g} GB of memory are left after {i} devices")
                self.launch(f"device-{i}")
                time.sleep(self.stagger)
            return
        for first in range(0, self.devices, EACH):
            spec = [self._fake(i) for i in range(first, min(self.devices, first + EACH))]
            env = processes.bound({**os.environ, "OMP_NUM_THREADS": "1"})
            argv = [sys.executable, __file__, "--fake", json.dumps(spec)]
            name = f"fake-{first // EACH}"
            self.children[name] = Child(name, argv, self.folder / "logs" / f"{name}.log", env).start()

    def _fake(self, i: int) -> tuple[int, str, str, str]:
        server = self.above(i)
        files = self.certs(server)
        return i, f"127.0.0.1:{self.ports[server]}", str(files.ca), str(files.key(f"device-{i}"))

    def arguments(self, name: str) -> list[str]:
        if name.startswith("device"):
            arguments = super().arguments(name)
            data = own_data(self.folder / "data", int(name.partition("-")[2]))
            arguments[arguments.index("--data") + 1] = str(data)
            at = arguments.index("--client")
            return arguments[:at] + arguments[at + 2 :]
        if name != "cloud":
            return super().arguments(name)
        where = ["--certs", str(self.certs("cloud").root), "--host", "127.0.0.1", "--port", str(self.ports["cloud"])]
        sets = {"eval_every": self.rounds, "watch": False, "final_trained": False, "seed": 0, "join": 1.0, "epochs": 1}
        what = ["--shape", SHAPE, "--classes", str(CLASSES), "--model", "lenet5"]
        return [
            "serve", "fedavg", *where, "--out", str(self.out), *what,
            "--clients", str(self.devices), "--min-clients", str(self.devices), "--rounds", str(self.rounds),
            "--deadline", "600", *(x for k, v in sets.items() for x in ("--set", f"{k}={json.dumps(v)}")),
        ]  # fmt: skip


@dataclass
class Usage:
    """CPU seconds and memory of processes by kind (cloud, edge, ...), read from /proc while they run."""

    cpu: dict[int, float] = field(default_factory=dict)
    peak: dict[int, int] = field(default_factory=dict)  # bytes resident
    kind: dict[int, str] = field(default_factory=dict)

    def measure(self, federation: LocalNodes) -> None:
        """Read the present usage of all processes."""
        for name, child in federation.children.items():
            if child.alive:
                self._measure(child.pid, name.partition("-")[0])

    def _measure(self, pid: int, kind: str) -> None:
        try:
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        self.kind[pid] = kind
        self.cpu[pid] = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
        now = max((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM")), default=0)
        self.peak[pid] = max(now, self.peak.get(pid, 0))

    def by_kind(self, values: dict[int, float] | dict[int, int]) -> dict[str, float]:
        """Sum values of processes by kind."""
        total: dict[str, float] = {}
        for pid, value in values.items():
            total[self.kind[pid]] = total.get(self.kind[pid], 0) + value
        return total


def measure(federation: Load, seconds: float, profile: Path | None = None) -> dict[str, Any]:
    """Run a federation to its end; return the numbers of one line."""
    usage, marks = Usage(), list[tuple[float, dict[str, float]]]()
    began, busy = time.monotonic(), os.getloadavg()[0]
    with federation:
        cloud, until = federation.children["cloud"], time.monotonic() + seconds
        measured = 0.0
        while (code := cloud.wait(0.02)) is None:
            new = rounds_done(federation.out) > len(marks)
            if new or time.monotonic() - measured > 1.0:
                usage.measure(federation)
                measured = time.monotonic()
            if new:
                marks.append((time.monotonic(), usage.by_kind(usage.cpu)))
                if profile is not None and len(marks) == 1:
                    start_profiler(federation, profile)
            if time.monotonic() > until:
                raise CoterieError(
                    f"{federation.devices} devices: {len(marks)} rounds in {seconds:g} s; see {cloud.log}"
                )
        if code != 0:
            raise CoterieError(f"the cloud ended with {code}:\n{cloud.tail()}")
    events = [json.loads(x) for x in (federation.out / "events.jsonl").read_text().splitlines()]
    times = [json.loads(x)["seconds"] for x in (federation.out / "timing.jsonl").read_text().splitlines()]
    inner = len(marks) - 2  # rounds between the first and the last
    spent = {k: (v - marks[0][1].get(k, 0)) / max(1, inner) for k, v in marks[-2][1].items()}
    return {
        "devices": federation.devices, "edges": federation.edges,
        "round": statistics.median(times[1:-1]), "last": times[-1], "start": marks[0][0] - began,
        "missed": sum(len(e["failed"]) for e in events), "cpu": spent,
        "mb": {k: v / 2**20 for k, v in usage.by_kind(usage.peak).items()}, "load": (busy, os.getloadavg()[0]),
    }  # fmt: skip


def rounds_done(out: Path) -> int:
    """Return the number of finished rounds."""
    try:
        return (out / "events.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def start_profiler(federation: Load, folder: Path) -> None:
    """Profile the cloud for 20 s with py-spy, which must be installed."""
    folder.mkdir(parents=True, exist_ok=True)
    out, pid = folder / f"{federation.devices}.txt", federation.children["cloud"].pid
    subprocess.Popen(["py-spy", "record", "-d", "20", "-f", "raw", "-t", "-o", str(out), "-p", str(pid)])


def as_line(numbers: dict[str, Any]) -> str:
    """Return the numbers of one size as a line of text."""
    cpu = " ".join(f"{k} {v:.2f}" for k, v in sorted(numbers["cpu"].items()))
    memory = " ".join(f"{k} {v:.0f}" for k, v in sorted(numbers["mb"].items()))
    return (
        f"{numbers['devices']:4} devices {numbers['edges']} edges: {numbers['round']:7.2f} s a round "
        f"(last {numbers['last']:.1f}, first after {numbers['start']:.0f}, missed {numbers['missed']}); "
        f"CPU s a round: {cpu}; MB: {memory}; load average {numbers['load'][0]:.1f}-{numbers['load'][1]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 16, 64, 100, 256])
    parser.add_argument("--edges", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1800.0, help="longest time for one size")
    parser.add_argument("--out", type=Path, help="append the numbers to this file, as lines of JSON")
    parser.add_argument("--profile", type=Path, help="profile the cloud with py-spy into this folder")
    parser.add_argument("--real", action="store_true", help="real device processes on tiny data")
    parser.add_argument("--stagger", type=float, default=0.5, help="seconds between starts of real devices")
    parser.add_argument("--fake", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.fake:
        run_fake_devices([(i, address, Path(ca), Path(key)) for i, address, ca, key in json.loads(a.fake)])
        return
    for edges in a.edges:
        for devices in a.devices:
            with tempfile.TemporaryDirectory() as tmp:
                federation = Load(
                    Path(tmp), "digits", "fedavg", None, devices=devices, edges=edges,
                    rounds=a.rounds, real=a.real, stagger=a.stagger,
                )  # fmt: skip
                try:
                    numbers = measure(federation, a.seconds, a.profile)
                except CoterieError as e:
                    print(f"{devices:4} devices {edges} edges: {e}", flush=True)
                    continue
            print(as_line(numbers), flush=True)
            if a.out is not None:
                with a.out.open("a") as f:
                    f.write(json.dumps(numbers) + "\n")


if __name__ == "__main__":
    main()
