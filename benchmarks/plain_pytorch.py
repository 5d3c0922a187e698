"""The floor: FedAvg as a careful researcher would write it by hand in plain PyTorch, with no features.

Tensors in memory, forked processes of one thread each, nn.Module + torch.optim.SGD + F.cross_entropy, weights in shared
memory. Coterie's engine and models are not used, so that improving them does not change the floor. Run it as
`python benchmarks/plain_pytorch.py W1 W2 W3 [--data-dir DIR]`; benchmarks/speed.py compares against `Floor`.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]  # x [n, ...], y [n]


class Floor:
    """FedAvg over `train`, one (x, y) per client, in forked processes that share the data.

    With `evaluate`, every participant is scored on its own test part before and after local training.
    """

    def __init__(
        self,
        train: Sequence[Pair],
        test: Sequence[Pair],
        factory: Callable[[], nn.Module],
        lr: float,
        epochs: int,
        batch: int,
        processes: int = 2,
        evaluate: bool = True,
    ):
        self.sizes = [len(y) for _, y in train]
        model = factory()
        self.weights = [v.detach().clone().share_memory_() for v in floating(model)]
        self.sums = [[torch.zeros_like(v).share_memory_() for v in self.weights] for _ in range(processes)]
        self.hits = torch.zeros(len(train), 2).share_memory_()  # correct answers of the last round: before, after
        fork = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for sums in self.sums:
            here, there = fork.Pipe()
            arguments = (there, model, train, test, self.weights, sums, self.hits, lr, epochs, batch, evaluate)
            process = fork.Process(target=work, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def round(self, ids: Sequence[int]) -> None:
        """Run a round with these participants; `weights` is then the new global model."""
        for pipe, share in zip(self.pipes, balanced(ids, self.sizes, len(self.pipes)), strict=True):
            pipe.send(share)
        for pipe in self.pipes:
            pipe.recv()
        total = sum(self.sizes[i] for i in ids)
        for value, *parts in zip(self.weights, *self.sums, strict=True):
            torch.sum(torch.stack(parts), 0, out=value)
            value /= total

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()
            pipe.close()


def floating(model: nn.Module) -> list[Tensor]:
    """Return the averaged tensors: parameters and batch-norm statistics."""
    return [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]


def balanced(ids: Sequence[int], sizes: Sequence[int], n: int) -> list[list[int]]:
    """Assign participants to processes, largest first to the process with the fewest samples so far."""
    shares: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for i in sorted(ids, key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += sizes[i]
    return shares


def work(
    pipe: Connection,
    model: nn.Module,
    train: Sequence[Pair],
    test: Sequence[Pair],
    weights: Sequence[Tensor],
    sums: Sequence[Tensor],
    hits: Tensor,
    lr: float,
    epochs: int,
    batch: int,
    evaluate: bool,
) -> None:
    """Train the participants of a process one by one and add up their weighted models."""
    torch.set_num_threads(1)
    own = floating(model)
    # plain SGD has no state, so all clients share one optimiser; the fused step is PyTorch's fastest
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, fused=True)
    lonely = any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()
    )  # batch norm cannot learn from one sample
    while (ids := pipe.recv()) is not None:
        for total in sums:
            total.zero_()
        for i in ids:
            x, y = train[i]
            with torch.no_grad():
                for mine, shared in zip(own, weights, strict=True):
                    mine.copy_(shared)
            if evaluate:
                hits[i, 0] = right(model, *test[i])
            model.train()
            for _ in range(epochs):
                order = torch.randperm(len(y))
                for bx, by in zip(x[order].split(batch), y[order].split(batch), strict=True):
                    if lonely and len(by) == 1:
                        continue
                    optimiser.zero_grad()
                    F.cross_entropy(model(bx), by).backward()
                    optimiser.step()
            if evaluate:
                hits[i, 1] = right(model, *test[i])
            with torch.no_grad():
                for total, mine in zip(sums, own, strict=True):
                    total.add_(mine, alpha=len(y))
        pipe.send(None)


def right(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Return the number of correct answers."""
    model.eval()
    with torch.inference_mode():
        return int((model(x).argmax(1) == y).sum())


# ---- the workloads --------------------------------------------------------------------------------------------------
class Workload(NamedTuple):
    data: str  # "random": pictures of noise
    model: Callable[[], nn.Module]
    name: str  # name of the same network in Coterie
    clients: int
    join: int  # participants per round
    epochs: int
    batch: int
    lr: float


def lenet5() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    """Two convolutions: the same network as Coterie's fedpc-cnn."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10)),
    )


WORKLOADS = {
    "W1": Workload("fmnist", lenet5, "lenet5", clients=100, join=10, epochs=5, batch=32, lr=0.01),
    "W2": Workload("digits", mlp, "mlp", clients=100, join=20, epochs=5, batch=16, lr=0.05),
    "W3": Workload("random", cnn, "fedpc-cnn", clients=1000, join=50, epochs=1, batch=10, lr=0.05),
}


def pairs(w: Workload, data_dir: Path | None, seed: int = 0) -> tuple[list[Pair], list[Pair]]:
    """Return the training and test part of every client."""
    if w.data == "random":
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(w.clients, 60, 3, 32, 32, generator=g), torch.randint(10, (w.clients, 60), generator=g)
        return [(a[:50], b[:50]) for a, b in zip(x, y, strict=True)], [
            (a[50:], b[50:]) for a, b in zip(x, y, strict=True)
        ]
    from coterie.data.federation import PartitionSettings, federate  # the partition only
    from coterie.data.sources import load_dataset

    least = 10 if w.data == "digits" else 40
    settings = PartitionSettings(
        partition="dirichlet(0.1)", clients=w.clients, val_share=0, min_size=least, short="fill"
    )
    federation = federate(load_dataset(w.data, data_dir), settings, seed)
    clients = federation.clients
    return [(*federation.data(i).train,) for i in clients], [(*federation.test(i),) for i in clients]


def measure(w: Workload, data_dir: Path | None, rounds: int, processes: int, evaluate: bool) -> list[float]:
    """Return the seconds of each round except the first, which warms up."""
    train, test = pairs(w, data_dir)
    floor = Floor(train, test, w.model, w.lr, w.epochs, w.batch, processes, evaluate)
    g = torch.Generator().manual_seed(1)
    seconds = []
    for _ in range(rounds + 1):
        ids = torch.randperm(w.clients, generator=g)[: w.join].tolist()
        start = time.perf_counter()
        floor.round(ids)
        seconds.append(time.perf_counter() - start)
    floor.close()
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds per round of a hand-written FedAvg loop.")
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-evaluate", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.workloads:
        seconds = measure(WORKLOADS[name], args.data_dir, args.rounds, args.processes, not args.no_evaluate)
        print(f"{name}  {statistics.median(seconds):.4f} s per round (median of {len(seconds)})", flush=True)


if __name__ == "__main__":
    main()
