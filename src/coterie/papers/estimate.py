"""Estimate the time of an item on this machine: timed steps of its model and batch, times the steps of its protocol.

The work of a method in addition to plain training is known for some methods only, and a busy machine is slower.
"""

import json
import math
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from coterie.config import Engine, RunSettings, settings
from coterie.core.method import Start
from coterie.data.arrays import from_arrays
from coterie.data.catalogue import DATASETS
from coterie.data.dataset import subset_size
from coterie.engine.session import prepare
from coterie.methods import find
from coterie.papers.presets import Item, Shrink, cell, layer_cells
from coterie.storage import atomic as disk
from coterie.train.trainer import train

# time of a round relative to FedAvg with the same settings: measured in single runs on a busy machine, or guessed
# (ditto, fedproto, fedrod, fedcp, fedamp, fedcpmd)
FACTORS = {
    "ditto": 2.0, "feddyn": 1.9, "fedprox": 1.5, "fedrep": 0.6, "prr-fl": 1.9, "sc-fpfl": 1.6, "sc-fpfl-no-agent": 0.9,
    "sc-fpfl-cluster-only": 0.5, "sc-fpfl-fourier-only": 1.4, "ecs-fl": 8.0, "ecs-fl-random": 8.0,
    "ecs-fl-mean-all": 5.0, "fedproto": 1.2, "fedpc": 0.9, "fedrod": 1.5, "fedcp": 1.5, "fedamp": 1.1, "fedcpmd": 1.1,
}  # fmt: skip
BUSY = 0.5  # load average per core above which the machine is busy
FORWARD = 0.35  # time of a forward pass relative to a training step on the same samples


@dataclass(frozen=True)
class Estimate:
    """The estimated seconds of an item."""

    available: float  # runs whose data are on this machine
    all: float


def cache_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "coterie" / "calibration.json"


class Calibration:
    """Seconds per training sample by model, shape, batch and optimiser, measured once per machine and cached.

    Times that are measured while other processes use the machine are used once and not stored.
    """

    def __init__(self, path: Path | None = None, fresh: bool = False):
        self.path = path or cache_file()
        self.busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)  # before our own work counts
        self.machine = f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        self.known: dict[str, dict[str, float]] = {}
        if not fresh and self.path.exists():
            try:
                self.known = json.loads(self.path.read_text())
            except (json.JSONDecodeError, UnicodeDecodeError, OSError):
                self.known = {}  # a damaged cache is measured again

    def seconds_per_sample(self, s: RunSettings) -> float:
        known = DATASETS.get(s.data)
        shape, classes = (known.shape, len(known.classes)) if known else ((1, 28, 28), 10)
        name = f"{s.model} {'x'.join(map(str, shape))} {classes} classes, batch {s.batch}, {s.optimizer}"
        mine = self.known.setdefault(self.machine, {})
        if name not in mine:
            mine[name] = measure(s, shape, classes)
            if not self.busy:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                disk.write_atomic(self.path, json.dumps(self.known, indent=1).encode())
        return mine[name]


def measure(s: RunSettings, shape: tuple[int, ...], classes: int, budget: float = 0.2) -> float:
    """Return the seconds per sample of local training on random pictures, from at least two short trainings."""
    n, names = math.ceil(s.batch / 0.8), tuple(map(str, range(classes)))
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (n, *shape), dtype=np.uint8), rng.permutation(np.arange(n) % classes)
    plain = settings(
        method="fedavg", model=s.model, batch=s.batch, optimizer=s.optimizer, lr=1e-4, epochs=1, clients=1,
        partition="iid", test_share=0.2, val_share=0, min_size=1, rounds=1, join=1.0, bn_stats=s.bn_stats,
    )  # fmt: skip
    session = prepare(plain, Engine(workers=1), loaded=from_arrays(x, y, name="stand-in", classes=names))
    method, data = session.method, session.federation.data(0)
    times: list[float] = []
    until = math.inf
    while len(times) < 2 or (time.perf_counter() < until and len(times) < 50):
        start = time.perf_counter()
        train(method.ctx, session.rule, method.phases(1), Start(method.ctx.w0), data, 1)
        times.append((time.perf_counter() - start) / len(data.train))
        until = min(until, time.perf_counter() + budget)  # after the first training, which warms up
    return min(times[1:])  # disturbances only make a measurement slower


def samples(s: RunSettings, whole: tuple[int, int]) -> float:
    """Return the training samples of one run; evaluations count as forward passes."""
    pool = sum(whole) if s.federation.pool == "merged" else whole[0]
    pool = min(pool, subset_size(s.subset)) if s.subset else pool
    official = s.federation.test_from == "official"
    test = whole[1] if official else pool * s.federation.test_share
    learn = (pool if official else pool - test) * (1 - s.federation.val_share)
    join = s.join * s.rounds
    work = join * (learn * s.epochs + 2 * FORWARD * test * s.watch)
    scored = math.ceil(s.rounds / s.eval_every) * FORWARD * 2 * test
    if s.official:  # every personal model on the whole official part; a global model is scored once
        models = 1 if "G" in find(s.method).card.family.split(",") else s.federation.clients or 1
        scored += math.ceil(s.rounds / s.eval_every) * FORWARD * models * whole[1]
    return work + scored + (learn * s.epochs if s.final_trained else 0)


def run_seconds(s: RunSettings, clock: Calibration, sizes: Mapping[str, tuple[int, int]], workers: int) -> float:
    """Estimate one run: steps of the protocol x time of a step / workers x factor of the method."""
    return samples(s, sizes[s.data]) * clock.seconds_per_sample(s) * FACTORS.get(s.method, 1.0) / workers


def estimate(
    it: Item, clock: Calibration, sizes: Mapping[str, tuple[int, int]], available_data: Iterable[str], workers: int
) -> Estimate:
    """Estimate each distinct run of an item once."""
    available, total, data = 0.0, 0.0, set(available_data)
    seen: set[str] = set()
    for row in it.rows:
        for column in it.columns:
            first = layer_cells(it, row, column, 0, Shrink()).values()
            for s in (cell(it, row, column, 0, Shrink()), *first):
                key = s.model_dump_json()
                if it.reads_only or key in seen:
                    continue
                seen.add(key)
                time_of_run = run_seconds(s, clock, sizes, workers)
                total += time_of_run
                available += time_of_run if s.data in data else 0.0
    return Estimate(available, total)


def duration_text(seconds: float) -> str:
    """Return a duration as text: '20 s', '14 min', '3.5 h', '2.1 days'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 129_600 else f"{seconds / 86_400:.1f} days"
