"""A federation made of tensors, on the real loop: for tests with numbers worked out by hand."""

import copy
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from coterie import tree as T
from coterie.folder import Folder
from coterie.loop import Loop, Schedule
from coterie.method import ClientData, Context, Split, Upload
from coterie.models.net import Net
from coterie.runtimes.states import Store
from coterie.runtimes.workers import start
from coterie.train.clients import Device
from coterie.train.optim import Optimiser

_count = itertools.count()
W = 51  # scalars of mlp() without batch norm


@dataclass(frozen=True)
class Toy:
    """What a device asks of a federation; everybody is tested on the training data."""

    parts: list[tuple[torch.Tensor, torch.Tensor]]
    classes: int

    def data(self, client):
        x, y = self.parts[client]
        return ClientData(client, Split(x, y), Split(x[:2], y[:2]), self.classes)

    def test(self, client):
        return Split(*self.parts[client])


def mlp(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    between = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(nn.Linear(4, 6), *between, nn.ReLU(), nn.Linear(6, 3))


def clients(n: int = 5, sizes=(7, 9, 6, 12, 8), seed: int = 0) -> Toy:
    """Unequal clients with tastes of their own."""
    rng = torch.Generator().manual_seed(seed)
    parts = []
    for i in range(n):
        x = torch.randn(sizes[i % len(sizes)], 4, generator=rng) + 0.3 * i
        parts.append((x, (x @ torch.randn(4, 3, generator=rng)).argmax(1)))
    return Toy(parts, 3)


def bind(cls, own=None, *, model=None, data=None, **ctx):
    """A method with its context, ready for single hooks."""
    data = data or clients()
    method = cls(**(own or {}))
    net = Net(copy.deepcopy(model or mlp()), data.parts[0][0][:2])
    base = {"rounds": 3, "join": 1.0, "epochs": 1, "batch": 4, "lr": 0.1, "seed": 0}
    everybody = tuple(range(len(data.parts)))
    method.ctx = Context(net=net, w0=net.state(), clients=everybody, classes=data.classes, **{**base, **ctx})
    method.check()
    return method


def open_toy(
    cls,
    tmp: Path,
    own=None,
    *,
    model=None,
    data=None,
    workers=1,
    optimizer="sgd",
    momentum=0.0,
    weight_decay=0.0,
    dropout=0.0,
    stragglers=0.0,
    disk=False,
    watch=True,
    **ctx,
) -> Loop:
    """A loop that has not run."""
    data = data or clients()
    method = bind(cls, own, model=model, data=data, **ctx)
    folder = Folder(tmp / f"toy{next(_count)}")
    device = Device(method, data, Optimiser(optimizer, momentum, weight_decay))
    plan = Schedule(
        method.ctx.rounds,
        method.ctx.seed,
        1,
        1,
        watch=watch,
        dropout=dropout,
        stragglers=stragglers,
        final_trained=False,
    )
    store = Store(folder.path, len(data.parts), disk)
    return Loop(method, start(device, workers), store, folder, lambda i: len(data.parts[i][1]), plan)


def play(cls, tmp: Path, own=None, **settings) -> Loop:
    """The same, run to its end."""
    loop = open_toy(cls, tmp, own, **settings)
    try:
        loop.run()
    finally:
        loop.runtime.close()
        loop.folder.close()
    return loop


def begin(loop: Loop) -> Loop:
    """Set up without running, for tests that go round by round."""
    loop.server = loop.method.setup()
    loop.folder.open_logs()
    return loop


def events(loop: Loop) -> list[dict]:
    return [json.loads(line) for line in (loop.folder.path / "events.jsonl").read_bytes().splitlines()]


def models(loop: Loop) -> dict:
    """What `personal` gives every client now."""
    method, out = loop.method, {}
    sent = method.down(loop.server, method.ctx.clients, loop.done + 1)
    data = loop.runtime.device.federation
    for i in method.ctx.clients:
        own = loop.store.get(i)
        state = own if own is not None else method.init_client(data.data(i))
        out[i] = method.personal(state, sent.to(i), data.data(i))[0]
    return out


def same(a, b) -> bool:
    """Two trees (or dictionaries of trees) to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return torch.equal(a, b)


def near(a, b, atol=1e-6) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(v, b[k], atol=atol, rtol=0) for k, v in a.items())


def planted(groups: int = 2, each: int = 3) -> Toy:
    """Groups that see the same inputs under labels turned by the group's number; ids of a group are not adjacent."""
    rng = torch.Generator().manual_seed(5)
    parts = []
    for i in range(groups * each):
        x = torch.randn(20, 4, generator=rng)
        parts.append((x, (x[:, :3].argmax(1) + i % groups) % 3))
    return Toy(parts, 3)


def uploads(trees, ids=None):
    return [Upload(t, {}, i, 10) for i, t in zip(ids or range(len(trees)), trees, strict=True)]


def moved(method, vectors):
    """w0 plus a step [P] over all entries, for each vector."""
    return [T.add(method.ctx.w0, T.unflatten(v, method.ctx.w0)) for v in vectors]
