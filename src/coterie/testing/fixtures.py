"""A small model, small data and a small federation in which methods are tried."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from coterie.config import Engine, RunSettings, settings
from coterie.core.method import Method
from coterie.data.arrays import from_arrays
from coterie.data.dataset import Dataset
from coterie.engine import codec
from coterie.engine.loop import Loop
from coterie.engine.session import Objects, Session, make_loop, prepare
from coterie.runtimes.inline import Inline
from coterie.runtimes.workers import Workers
from coterie.storage.run_folder import Folder, read_log
from coterie.train.devices import find_devices


class SmallNet(nn.Module):
    """Two hidden layers with batch norm: has everything that a method may need of a model.

    The head is registered before the layers that it follows, so that a method that relies on the order of names fails.
    """

    def __init__(self, features: int = 64, classes: int = 10, norm: bool = True):
        super().__init__()
        self.classifier = nn.Linear(16, classes)
        self.fc1 = nn.Linear(features, 24)
        self.bn1: nn.Module = nn.BatchNorm1d(24) if norm else nn.Identity()
        self.fc2 = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.fc1(x.flatten(1))))
        return self.classifier(torch.relu(self.fc2(x)))  # type: ignore[no-any-return]


@cache
def small_data(n: int = 600) -> Dataset:
    """Return the first n of scikit-learn's handwritten digits."""
    x, y = load_digits(return_X_y=True)
    images = torch.from_numpy(x[:n]).float().view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(y[:n]).long()
    return Dataset("small-digits", images, labels, tuple("0123456789"), torch.zeros(n, dtype=torch.bool))


@cache
def small_numbers(clients: int = 3, each: int = 60) -> Dataset:
    """Return a regression task: the same line for all clients, with an offset per client."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(clients * each, 4)).astype(np.float32)
    owner = np.repeat(np.arange(clients), each)
    y = 2 * x[:, 0] + 0.5 * rng.normal(size=clients)[owner] + 0.1 * rng.normal(size=len(x))
    return from_arrays(x, y, name="small-numbers", client=owner, task="regression")


@dataclass(frozen=True)
class Bench:
    """A small federation to run a method in."""

    method: type[Method]
    own: dict[str, Any]  # settings of the method
    model: Callable[[], nn.Module] = SmallNet
    engine: Engine = field(default_factory=lambda: Engine(workers=1))

    def session(self, objects: Objects | None = None, **changes: Any) -> Session:
        """Return a session with changed settings of the run."""
        base: dict[str, Any] = {
            "rounds": 3, "join": 0.6, "epochs": 1, "batch": 16, "lr": 0.1, "eval_every": 1, "checkpoint_every": 1,
            "clients": 5, "partition": "dirichlet(0.5)", "val_share": 0.2, "public": 30, "seed": 3,
        }  # fmt: skip
        run: RunSettings = settings(**{"method": "fedavg", **base, **changes}).model_copy(
            update={"method": self.method.__name__, "settings": self.own}
        )
        torch.manual_seed(0)
        made = Objects(self.method, small_data(), self.model())
        return prepare(run, self.engine, made if objects is None else objects)

    def play(self, folder: Path, session: Session | None = None, workers: int = 1, **changes: Any) -> Loop:
        """Run to the end; return the loop, with its server, edges, client states and bytes."""
        return play(open_loop(session or self.session(**changes), folder, workers))


def open_loop(session: Session, folder: Path, workers: int = 1) -> Loop:
    """Return a loop over a real runtime, before its first round."""
    states, devices = session.states(folder), find_devices(session.engine.device)
    if workers > 1:
        return make_loop(session, Folder(folder), Workers(session.clients(), states, workers, session.cost, devices))
    return make_loop(session, Folder(folder), Inline(session.clients(), states, session.cost, devices[0]))


def play(loop: Loop) -> Loop:
    """Run a loop to its end and close it."""
    try:
        loop.run()
    finally:
        close_loop(loop)
    return loop


def close_loop(loop: Loop) -> None:
    """Close the runtime and the folder of a loop."""
    loop.runtime.close()
    loop.folder.close()


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run's folder."""
    return read_log(folder / "events.jsonl").rows


def decided(loop: Loop) -> codec.Value:
    """Return all results of a run, for comparisons to the bit."""
    states = {i: loop.runtime.states.get(i) for i in loop.method.ctx.clients}  # type: ignore[attr-defined]
    return codec.deep_copy({"server": loop.server, "edges": loop.edges, "clients": states, "bytes": loop.bytes})
