"""Measure the time per round of every method relative to FedAvg, in one table.

    python benchmarks/methods.py [NAME ...] [--data fmnist --data-dir DIR --model lenet5 --rounds 8]

Each method does a whole short run, so that it goes through all its phases. After each of its rounds FedAvg does a round
with the same participants, and the ratio is that of the sums. Evaluation is off; a round 0 is reported separately.
Use --cpu on a busy machine: it measures the time of this process (with one worker) instead of the clock.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from coterie.config import Engine, settings
from coterie.data.sources import load_dataset
from coterie.engine.loop import Loop
from coterie.engine.session import prepare
from coterie.errors import CoterieError
from coterie.methods import find, method_names
from coterie.testing import close_loop, open_loop


def ready(method: str, args: argparse.Namespace, out: Path) -> Loop:
    given = {"data": args.data, "model": args.model, "rounds": args.rounds, "clients": args.clients, "join": args.join}
    given |= {"subset": args.subset} if args.subset else {}
    given |= {"epochs": args.epochs, "batch": args.batch, "lr": 0.01, "partition": "dirichlet(0.1)", "short": "fill"}
    chosen = settings(method=method, **given, public=200, eval_every=10**6, watch=False, test_share=0.5, val_share=0.1)
    loop = open_loop(prepare(chosen, Engine(workers=args.workers), loaded=args.dataset), out, args.workers)
    loop.schedule = replace(loop.schedule, rounds=10**6)  # no last evaluation
    loop.start()
    return loop


def timed(loop: Loop, clock: Callable[[], float], ids: list[int] | None = None) -> tuple[float, list[int]]:
    """Run the next round with these participants or those of the method; return its seconds and its participants."""
    t, begin = loop.done + 1, clock()
    participants = ids if ids is not None else loop.method.sample(loop.server, t, torch.Generator().manual_seed(t))
    loop.method.sample = lambda *_: participants  # type: ignore[method-assign]
    loop.step()
    del loop.method.sample
    return clock() - begin, participants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--subset", type=int)
    parser.add_argument("--model", default="mlp-bn")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--join", type=float, default=0.2)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if args.cpu:
        args.workers = 1
    clock = time.process_time if args.cpu else time.perf_counter
    torch.set_num_threads(1)
    args.dataset = load_dataset(args.data, args.data_dir)
    print("| method | FedAvg's time per round | round 0, in rounds of FedAvg |\n|---|---|---|")
    for name in args.names or method_names():
        with tempfile.TemporaryDirectory() as tmp:
            try:
                loop, base = ready(name, args, Path(tmp) / "m"), ready("fedavg", args, Path(tmp) / "f")
            except CoterieError as e:
                print(f"| {find(name).card.title} | {e} | |", flush=True)
                continue
            opening = timed(loop, clock)[0] if loop.method.opening() else 0.0
            own, other = [], []
            for _ in range(args.rounds):
                seconds, participants = timed(loop, clock)
                own.append(seconds)
                other.append(timed(base, clock, participants)[0])
            for x in (loop, base):
                close_loop(x)
        first = f"{opening / statistics.median(other[1:]):.1f}" if opening else ""
        print(f"| {find(name).card.title} | {sum(own[1:]) / sum(other[1:]):.2f} | {first} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
