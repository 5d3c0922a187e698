"""Measure the time per round of Coterie relative to the hand-written floor.

    python benchmarks/speed.py [W1 W2 W3] [--data-dir DIR] [--rounds 9] [--no-evaluation] [--start-up]

Both sides do the same work on the same clients: the same participants, epochs and batches, and (unless switched off)
the same evaluation of the participants before and after local training. Rounds of both alternate, so that a noisy
machine disturbs both alike; the ratio is the median over pairs of rounds.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from plain_pytorch import WORKLOADS, Floor, Pair, Workload, pairs

from coterie.config import Engine, settings
from coterie.core.rng import torch_rng
from coterie.data.dataset import Dataset
from coterie.data.sources import load_dataset
from coterie.engine.loop import Loop
from coterie.engine.session import Objects, prepare
from coterie.testing import close_loop, open_loop


def coterie(
    w: Workload, data_dir: Path | None, workers: int, evaluate: bool, out: Path, method: str = "fedavg"
) -> Loop:
    """Return a loop before its first round, without evaluations of all clients and checkpoints."""
    base = {"method": method, "model": w.name, "rounds": 10**6, "join": w.join / w.clients, "epochs": w.epochs}
    base |= {"batch": w.batch, "lr": w.lr, "clients": w.clients, "eval_every": 10**6, "watch": evaluate, "val_share": 0}
    least = 10 if w.data == "digits" else 40
    if w.data == "random":
        chosen = settings(**base, data="noise", partition="natural", test_share=1 / 6, min_size=1, stratify=False)
        session = prepare(chosen, Engine(workers=workers), Objects(dataset=noise(w)))
    else:
        chosen = settings(**base, data=w.data, partition="dirichlet(0.1)", min_size=least, short="fill")
        session = prepare(chosen, Engine(workers=workers, data_dir=data_dir))
    loop = open_loop(session, out, workers)
    loop.start()
    return loop


def noise(w: Workload) -> Dataset:
    g = torch.Generator().manual_seed(0)
    n = w.clients * 60
    x, y = torch.randn(n, 3, 32, 32, generator=g), torch.randint(10, (n,), generator=g)
    owner = torch.arange(w.clients).repeat_interleave(60)
    return Dataset("noise", x, y, tuple("0123456789"), torch.zeros(n, dtype=torch.bool), owner)


def participants(loop: Loop, t: int) -> list[int]:
    return loop.method.sample(loop.server, t, torch_rng(loop.schedule.rules.seed, "sample", t))


def against_floor(name: str, w: Workload, args: argparse.Namespace, tmp: Path) -> None:
    evaluate = not args.no_evaluation
    train, test = pairs(w, args.data_dir)
    two = coterie(w, args.data_dir, 2, evaluate, tmp / f"{name}-2")
    one = coterie(w, args.data_dir, 1, evaluate, tmp / f"{name}-1")
    floor = Floor(train, test, w.model, w.lr, w.epochs, w.batch, 2, evaluate)
    check_same_work(two, train)
    times: dict[str, list[float]] = {"floor": [], "coterie": [], "one worker": []}
    for t in range(1, args.rounds + 2):
        ids = participants(two, t)
        plan = [("floor", lambda: floor.round(ids)), ("coterie", two.step)]  # noqa: B023
        if t <= 1 + args.rounds // 2:
            plan.append(("one worker", one.step))
        for side, work in plan if t % 2 else plan[::-1]:
            begin = time.perf_counter()
            work()
            if t > 1:  # the first round warms up caches
                times[side].append(time.perf_counter() - begin)
    floor.close()
    for loop in (one, two):
        close_loop(loop)
    ratio = statistics.median(c / f for c, f in zip(times["coterie"], times["floor"], strict=True))
    speedup = statistics.median(o / c for o, c in zip(times["one worker"], times["coterie"], strict=False))
    middle = {k: statistics.median(v) for k, v in times.items()}
    print(
        f"{name}: floor {middle['floor']:.4f} s, coterie {middle['coterie']:.4f} s, ratio {ratio:.2f}; "
        f"one worker {middle['one worker']:.4f} s, two are {speedup:.2f} times as fast"
        f"{'' if evaluate else ' (no evaluation)'}",
        flush=True,
    )


def check_same_work(loop: Loop, train: list[Pair]) -> None:
    """Check that both sides have the same clients."""
    federation = loop.runtime.clients.federation  # type: ignore[attr-defined]
    sizes = [federation.size(i) for i in loop.method.ctx.clients]
    assert sizes == [len(y) for _, y in train], "the two sides have different clients"


def start_up(args: argparse.Namespace) -> None:
    """Measure the time from the shell to the end of the first round of W2, imports included."""
    with tempfile.TemporaryDirectory() as tmp:
        command = [
            sys.executable,
            "-m",
            "coterie",
            "run",
            "fedavg",
            "--clients",
            "100",
            "--rounds",
            "1",
            "--join",
            "0.2",
        ]
        command += ["--set", "short=fill", "--set", "final_trained=false", "-q"]
        times = []
        for i in range(3):
            begin = time.perf_counter()
            subprocess.run([*command, "--out", f"{tmp}/{i}"], check=True)
            times.append(time.perf_counter() - begin)
    print(f"start-up, shell to the end of a one-round run with evaluation: {min(times):.2f} to {max(times):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="*", default=["W2", "W1"], help="W1, W2 or W3")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=9, help="timed pairs of rounds (W2: ten times as many)")
    parser.add_argument("--no-evaluation", action="store_true")
    parser.add_argument("--start-up", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.start_up:
        start_up(args)
    for name in args.workloads:
        w = WORKLOADS[name]
        if w.data == "fmnist":
            load_dataset("fmnist", args.data_dir)  # raises with instructions if the files are missing
        scaled = argparse.Namespace(**{**vars(args), "rounds": args.rounds * (10 if name == "W2" else 1)})
        with tempfile.TemporaryDirectory() as tmp:
            against_floor(name, w, scaled, Path(tmp))


if __name__ == "__main__":
    main()
