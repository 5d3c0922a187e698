"""One contender of bench.py: the hand-written floor, or Coterie in one of its configurations."""

import argparse
import tempfile
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_pytorch import WORKLOADS, Floor, Pair, Workload
from turn_taking import next_round, say


@cache
def stored(path: Path) -> list[Pair]:
    """Return the clients' training data that bench.py wrote."""
    x, y = (torch.from_numpy(np.load(path.with_suffix(f".{name}.npy"))) for name in "xy")
    at = np.load(path.with_suffix(".at.npy"))
    return [(x[a:b], y[a:b]) for a, b in pairwise(at)]


def run_floor(w: Workload, file: Path, processes: int) -> None:
    train = stored(file)
    floor = Floor(train, train, w.model, w.lr, w.epochs, w.batch, processes, evaluate=False)
    say(ready=True)
    while turn := next_round():
        begin = time.perf_counter()
        floor.round(turn[1])
        say(seconds=time.perf_counter() - begin)
    floor.close()


def session_of(w: Workload, data_dir: Path | None, engine: dict[str, Any], watch: bool = False) -> Any:
    """Return the workload as a session of Coterie, without evaluations of all clients and checkpoints."""
    from coterie.config import Engine, settings
    from coterie.engine.session import Objects, prepare

    base = {"method": "fedavg", "model": w.name, "rounds": 10**6, "join": w.join / w.clients, "epochs": w.epochs}
    base |= {"batch": w.batch, "lr": w.lr, "clients": w.clients, "eval_every": 10**6, "watch": watch, "val_share": 0}
    if w.data == "random":
        own = {"data": "noise", "partition": "natural", "test_share": 1 / 6, "min_size": 1, "stratify": False}
    else:
        smallest = 10 if w.data == "digits" else 40
        own = {"data": w.data, "partition": "dirichlet(0.1)", "min_size": smallest, "short": "fill"}
    objects = Objects(dataset=dataset_of(w, data_dir))
    return prepare(settings(**base, **own), Engine(data_dir=data_dir, **engine), objects)


def dataset_of(w: Workload, data_dir: Path | None) -> Any:
    """Return real data if they are available, otherwise random ones of the same shape and sizes."""
    from coterie.data.dataset import Dataset
    from coterie.data.sources import load_dataset
    from coterie.errors import CoterieError

    g = torch.Generator().manual_seed(0)
    names = tuple("0123456789")
    if w.data == "random":
        n = w.clients * 60
        x, y = torch.randn(n, 3, 32, 32, generator=g), torch.randint(10, (n,), generator=g)
        owner = torch.arange(w.clients).repeat_interleave(60)
        return Dataset("noise", x, y, names, torch.zeros(n, dtype=torch.bool), owner)
    try:
        return load_dataset(w.data, data_dir)
    except CoterieError:
        x = torch.randint(256, (70_000, 1, 28, 28), generator=g, dtype=torch.uint8)
        test = torch.arange(70_000) >= 60_000
        y = torch.randint(10, (70_000,), generator=g)
        return Dataset("like-fmnist", x, y, names, test, mean=(0.5,), std=(0.29,))


def run_coterie(w: Workload, data_dir: Path | None, engine: dict[str, Any], shipped: bool) -> None:
    from coterie.engine.session import make_loop, open_runtime
    from coterie.storage.run_folder import Folder

    session = session_of(w, data_dir, engine, watch=shipped)
    evaluations: list[float] = []  # seconds of an evaluation of all clients, which every tenth round has by default
    with (
        tempfile.TemporaryDirectory() as tmp,
        Folder(Path(tmp)) as folder,
        open_runtime(session, Path(tmp)) as runtime,
    ):
        loop = make_loop(session, folder, runtime)
        loop.start()
        say(ready=True)
        while turn := next_round():
            assert turn[0] == loop.done + 1
            begin = time.perf_counter()
            loop.step()
            seconds = time.perf_counter() - begin
            if shipped and len(evaluations) < 3:
                begin = time.perf_counter()
                loop.evaluate()
                evaluations.append(time.perf_counter() - begin)
            say(seconds=seconds + (sorted(evaluations)[len(evaluations) // 2] / 10 if evaluations else 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["floor", "coterie"])
    parser.add_argument("workload", choices=[*WORKLOADS])
    parser.add_argument("file", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--engine", help="loop or stack")
    parser.add_argument("--runtime", default="local")
    parser.add_argument("--shipped", action="store_true", help="with the evaluation that is on by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    w = WORKLOADS[args.workload]
    if args.kind == "floor":
        run_floor(w, args.file, args.workers)
    else:
        engine = {"workers": args.workers, "runtime": args.runtime} | ({"engine": args.engine} if args.engine else {})
        run_coterie(w, args.data_dir, engine, args.shipped)


if __name__ == "__main__":
    main()
