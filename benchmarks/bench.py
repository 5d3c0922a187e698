"""Compare the speed of Coterie in its configurations, of the hand-written floor, and of installed peers in one table.

    python benchmarks/bench.py [W1 W2 W3] [--quick] [--minutes 9] [--data-dir DIR] [--out table.md|table.csv]

Every contender is a separate process with the same clients, model, epochs and batches. Contenders take turns round by
round, so that a noisy machine disturbs all of them alike; a ratio is the median over the rounds of (its time / the
floor's time just before). Peers choose their participants themselves, so their times are scaled to the number of
samples. Memory is the proportional set size of a contender and its child processes. Peers are searched in this
environment, or in that of --flower-python and --pfl-python.
"""

import argparse
import contextlib
import csv
import io
import json
import os
import queue
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
from contender import dataset_of, session_of
from plain_pytorch import WORKLOADS, Workload
from turn_taking import family, pss

HERE = Path(__file__).parent
COLUMNS = ("workload", "contender", "s per round", "x floor", "GFLOP/s", "% of GEMM peak", "MB")
PATIENCE = 90.0  # seconds for a start or a round
WARM = {"W1": 1, "W2": 20, "W3": 1}  # rounds that are not counted; short steps are traced after some uses
ENDING = 10.0  # seconds in which Ray and Flower end
QUIET = {  # one thread each, no telemetry; by default, Ray's workers run at nice 15, which any other load starves
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
}


@dataclass
class Contender:
    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    memory: int = 0
    failed: str = ""
    process: Any = None
    lines: Any = None  # queue of its unread answers
    log: Path = Path()

    def start(self, log: Path) -> None:
        environment = {**os.environ, **QUIET, **self.environment}
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        self.lines = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            if line.startswith(b"@"):
                self.lines.put(line)
        self.lines.put(None)

    def hear(self) -> dict[str, Any]:
        """Return the next answer; other output of libraries is ignored."""
        try:
            if (line := self.lines.get(timeout=PATIENCE)) is not None:
                return dict(json.loads(line[1:]))
        except queue.Empty:
            pass
        last = [x for x in self.log.read_text(errors="replace").splitlines() if x.strip()][-1:]
        self.failed = (last or ["no answer"])[0].strip()[:90]
        self.stop(patience=5)  # so that it does not disturb the others
        return {}

    def round(self, t: int, ids: list[int]) -> dict[str, Any]:
        try:
            self.process.stdin.write(f"{t} {' '.join(map(str, ids))}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.hear()

    def dismiss(self) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def stop(self, patience: float = 15) -> None:
        """Close its input, wait for its end, then kill it and its child processes."""
        if self.process is None:
            return
        started = family(self.process.pid)
        self.dismiss()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def contenders(name: str, file: Path, args: argparse.Namespace) -> list[Contender]:
    from coterie.config import Engine

    script = [sys.executable, str(HERE / "contender.py")]
    ours = [*script, "coterie", name, str(file), *(["--data-dir", str(args.data_dir)] if args.data_dir else [])]
    off = {"COTERIE_NATIVE": "0"}
    plain = ["--engine", "loop"] if "engine" in Engine.model_fields else []
    out = [
        Contender("floor, 2 processes", [*script, "floor", name, str(file)]),
        Contender("Coterie, 2 workers", [*ours, *plain]),
        Contender("Coterie, 2 workers, default evaluation on", [*ours, "--shipped", *plain]),
        Contender("Coterie, 2 workers, native code off", [*ours, *plain], off),
    ]
    if args.quick:
        return out
    out.append(Contender("Coterie, 1 worker", [*ours, "--workers", "1", *plain]))
    if plain:
        out.append(Contender("Coterie, 2 workers, stack", [*ours, "--engine", "stack"]))
        out.append(Contender("Coterie, 1 worker, stack", [*ours, "--engine", "stack", "--workers", "1"]))
    if has(sys.executable, "ray"):
        out.append(Contender("Coterie, Ray, 2 actors", [*ours, "--runtime", "ray", *plain]))
    if has(args.flower_python, "flwr", "ray"):
        out.append(Contender("Flower simulation, 2 actors", peer(args.flower_python, "peer_flower.py", name, file)))
    if has(args.pfl_python, "pfl"):
        run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29511"]
        out.append(Contender("pfl, 2 processes", peer(args.pfl_python, "peer_pfl.py", name, file, run)))
    return out


def peer(python: str, script: str, name: str, file: Path, before: list[str] | None = None) -> list[str]:
    return [python, *(before or []), str(HERE / script), name, str(file)]


def has(python: str, *modules: str) -> bool:
    looks = f"import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in {list(modules)!r}))"
    return subprocess.run([python, "-c", looks], capture_output=True).returncode == 0


def write_data(w: Workload, data_dir: Path | None, file: Path) -> Any:
    """Write the clients' training data for all contenders; return Coterie's session, which samples the participants."""
    session = session_of(w, data_dir, {"workers": 1})
    parts = [session.federation.data(i).train for i in session.federation.clients]
    np.save(file.with_suffix(".x.npy"), torch.cat([p.x for p in parts]).numpy())
    np.save(file.with_suffix(".y.npy"), torch.cat([p.y for p in parts]).numpy())
    np.save(file.with_suffix(".at.npy"), np.cumsum([0, *(len(p) for p in parts)]))
    return session


def compete(name: str, args: argparse.Namespace, seconds: float) -> tuple[list[Contender], float]:
    """Run rounds in turn until the time is up; return the contenders and the floating-point operations of a round."""
    from coterie.core.rng import torch_rng

    w, entry = WORKLOADS[name], time.monotonic()
    with tempfile.TemporaryDirectory() as tmp:
        file = Path(tmp) / "data"
        session = write_data(w, args.data_dir, file)
        sizes = session.federation.sizes("train")
        usual = w.join * float(sizes.mean())
        rivals = contenders(name, file, args)
        try:
            begin = time.monotonic()
            for i, rival in enumerate(rivals):
                rival.start(Path(tmp) / f"{i}.log")
            for rival in rivals:
                rival.hear()
            print(f"{name}: {len(rivals)} contenders started in {time.monotonic() - begin:.0f} s", flush=True)
            begin = time.monotonic()
            for t in range(1, WARM[name] + 60):
                ids = session.method.sample({}, t, torch_rng(session.settings.seed, "sample", t))
                samples = int(sizes[ids].sum())
                reference = 0.0
                for rival in rivals:
                    if rival.failed:
                        continue
                    answer = rival.round(t, ids)
                    if not answer or t <= WARM[name]:
                        continue
                    spent = answer["seconds"] * samples / answer.get("samples", samples)
                    reference = reference or spent
                    rival.times.append(spent * usual / samples)
                    rival.ratios.append(spent / reference)
                now = time.monotonic()
                if t >= WARM[name] + 2 and now - entry + (now - begin) / t + ENDING > seconds:
                    break
            for rival in rivals:
                rival.memory = pss(rival.process.pid) if rival.process else 0
        finally:
            for rival in rivals:
                rival.dismiss()
            for rival in rivals:
                rival.stop()
    return rivals, flops(w, session) * usual * w.epochs


def flops(w: Workload, session: Any) -> float:
    """Return the floating-point operations of one sample, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    model, counter = w.model(), FlopCounterMode(display=False)
    x = session.federation.data(0).train.x[:2]
    with counter:
        model(x).sum().backward()
    return float(counter.get_total_flops() / len(x))


def gemm_peak() -> float:
    """Return the GFLOP/s of matrix products in two processes with a thread each, the peak of the machine."""
    code = (
        "import torch, time; torch.set_num_threads(1); a = torch.randn(1024, 1024); torch.mm(a, a); best = 9.\n"
        "for _ in range(30):\n t = time.perf_counter(); torch.mm(a, a); best = min(best, time.perf_counter() - t)\n"
        "print(2 * 1024**3 / best / 1e9)"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    return sum(float(p.communicate()[0]) for p in both)


def row(name: str, rival: Contender, work: float, peak: float) -> list[str]:
    if rival.failed or not rival.times:
        return [name, rival.name, "–", "–", "–", "–", rival.failed or "no time left"]
    seconds = statistics.median(rival.times)
    rate, shown = work / seconds / 1e9, f"{seconds:.4f}" if seconds < 0.1 else f"{seconds:.2f}"
    return [
        name, rival.name, shown, f"{statistics.median(rival.ratios):.2f}",
        f"{rate:.1f}", f"{100 * rate / peak:.0f}", f"{rival.memory / 2**20:.0f}",
    ]  # fmt: skip


def markdown(rows: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(r) + " |" for r in (COLUMNS, ["---"] * len(COLUMNS), *rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="W1, W2 or W3; default: all")
    parser.add_argument("--quick", action="store_true", help="W1 and W2, Coterie and the floor only; under 2 minutes")
    parser.add_argument("--minutes", type=float, help="time for all workloads (default: 9, quick: 1.6)")
    parser.add_argument("--data-dir", type=Path, help="folder of Fashion-MNIST (default: $COTERIE_DATA)")
    parser.add_argument("--flower-python", default=os.environ.get("FLOWER_PYTHON", sys.executable))
    parser.add_argument("--pfl-python", default=os.environ.get("PFL_PYTHON", sys.executable))
    parser.add_argument("--out", type=Path, action="append", default=[], help="also write the table here (.md or .csv)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that contenders are ended too
    torch.set_num_threads(1)
    names = args.workloads or (["W1", "W2"] if args.quick else [*WORKLOADS])
    share = {"W1": 0.35, "W2": 0.2, "W3": 0.45}
    end = time.monotonic() + 60 * (args.minutes or (1.6 if args.quick else 9))
    peak = gemm_peak()
    print(f"GEMM peak, 2 processes: {peak:.0f} GFLOP/s", flush=True)
    if "W1" in names and dataset_of(WORKLOADS["W1"], args.data_dir).name == "like-fmnist":
        print("W1: Fashion-MNIST was not found, so noise of the same shape and sizes is used")
    rows = []
    for i, name in enumerate(names):
        left = end - time.monotonic()
        rivals, work = compete(name, args, left * share[name] / sum(share[n] for n in names[i:]))
        rows += [row(name, rival, work, peak) for rival in rivals]
        print(f"{name}: {len(rivals[0].times)} rounds of each", flush=True)
    print("\n" + markdown(rows))
    for out in args.out:
        text = io.StringIO()
        csv.writer(text).writerows([COLUMNS, *rows])
        out.write_text(text.getvalue() if out.suffix == ".csv" else markdown(rows) + "\n")


if __name__ == "__main__":
    main()
