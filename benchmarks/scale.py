"""Measure memory and time per round against the number of clients, whose states are on disk.

    python benchmarks/scale.py [--clients 1000 10000] [--samples 50] [--join 50] [--method fedrep] [--rounds 12]

Each size runs in a separate process; memory is the PSS of the process and its workers during the run, without the
data. Samples are real digits, drawn with replacement.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


def measure(clients: int, samples: int, join: int, method: str, rounds: int) -> dict[str, float]:
    import torch

    from coterie.config import Engine, settings
    from coterie.data.dataset import Dataset
    from coterie.data.sources import load_dataset
    from coterie.engine.session import Callbacks, Objects, execute, prepare

    base = load_dataset("digits")
    pick = torch.randint(len(base), (clients * samples,), generator=torch.Generator().manual_seed(0))
    owner = torch.arange(clients).repeat_interleave(samples)
    data = Dataset(
        "many-digits", base.x[pick], base.y[pick], base.classes, torch.zeros(len(pick), dtype=torch.bool), owner
    )
    before = pss(os.getpid())
    start = time.perf_counter()
    chosen = settings(
        method=method, data="many-digits", partition="natural", clients=clients, min_size=1, rounds=rounds,
        join=join / clients, epochs=1, batch=10, eval_every=10**6, checkpoint_every=4, watch=False, stratify=False,
    )  # fmt: skip
    session = prepare(chosen, Engine(state="disk"), Objects(dataset=data))
    peak, times, first = [0], [], [0.0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.3):
            peak[0] = max(peak[0], family(os.getpid()))

    def tell(progress: object) -> None:
        first[0] = first[0] or time.perf_counter() - start
        times.append(progress.seconds)  # type: ignore[attr-defined]

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    with tempfile.TemporaryDirectory() as tmp:
        # without the last round, which scores all clients
        execute(session, Path(tmp) / "run", Callbacks(on_round=tell, should_stop=lambda: len(times) >= rounds - 1))
    stop.set()
    return {"seconds": statistics.median(times[1:]), "mb": (peak[0] - before) / 2**20, "first_round": first[0]}


def pss(pid: int) -> int:
    """Return the proportional set size in bytes."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024


def family(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return pss(pid) + sum(pss(int(c)) for c in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="*", default=[1000, 10000])
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--join", type=int, default=50, help="participants per round")
    parser.add_argument("--method", default="fedrep")
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.samples, args.join, args.method, args.rounds)))
        return
    base = None
    for n in args.clients:
        command = [sys.executable, __file__, "--one", str(n), "--samples", str(args.samples), "--join", str(args.join)]
        command += ["--method", args.method, "--rounds", str(args.rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        base = base or found["seconds"]
        print(
            f"{n:,} clients x {args.samples}: {found['seconds'] * 1000:.1f} ms per round "
            f"({found['seconds'] / base:.2f} times the first), {found['mb']:.0f} MB beyond the data, "
            f"{found['first_round']:.1f} s to the first round",
            flush=True,
        )


if __name__ == "__main__":
    main()
