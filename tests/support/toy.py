"""A small federation of tensors on the real loop, for tests whose expected numbers are worked out by hand."""

import copy
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from coterie import testing
from coterie.core import tree as T
from coterie.core.method import ClientData, Context, Split, Upload, replace
from coterie.core.net import Net
from coterie.core.tasks import Classification
from coterie.engine.edge_steps import preview
from coterie.engine.loop import Loop, Schedule
from coterie.engine.round import Rules
from coterie.runtimes.inline import Inline
from coterie.runtimes.workers import Workers
from coterie.storage.client_states import ClientStates
from coterie.storage.run_folder import Folder
from coterie.train.clients import Clients
from coterie.train.optimisers import Optimiser

_count = itertools.count()
_folders: list[Folder] = []
W = 51  # scalars of mlp() without batch norm
NORMS = [False, True]  # values of mlp's argument
OPTIMISERS = [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 0.01}]


@dataclass(frozen=True)
class Toy:
    """The data of a federation; clients are tested on their training data."""

    parts: list[tuple[torch.Tensor, torch.Tensor]]
    classes: int

    def data(self, client, round=1):
        x, y = self.parts[client]
        return ClientData(client, Split(x, y), Split(x[:2], y[:2]), self.classes)

    def test(self, client, round=1):
        return Split(*self.parts[client])


def mlp(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    between = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(nn.Linear(4, 6), *between, nn.ReLU(), nn.Linear(6, 3))


def clients(n: int = 5, sizes=(7, 9, 6, 12, 8), seed: int = 0) -> Toy:
    """Return clients that differ in size, inputs and labelling."""
    rng = torch.Generator().manual_seed(seed)
    parts = []
    for i in range(n):
        x = torch.randn(sizes[i % len(sizes)], 4, generator=rng) + 0.3 * i
        parts.append((x, (x @ torch.randn(4, 3, generator=rng)).argmax(1)))
    return Toy(parts, 3)


def bind(cls, own=None, *, model=None, data=None, **ctx):
    """Return a method with its context, so that a test can call single hooks."""
    data = data or clients()
    method = cls(**(own or {}))
    net = Net(copy.deepcopy(model or mlp()), data.parts[0][0][:2])
    base = {"join": 1.0, "epochs": 1, "batch": 4, "lr": 0.1, "seed": 0}
    ctx = {**base, "planned_rounds": ctx.pop("rounds", 3), **ctx}
    everybody = tuple(range(len(data.parts)))
    method.ctx = Context(net=net, w0=net.state(), clients=everybody, task=Classification(data.classes), **ctx)
    method.check()
    return method


def with_clients(method, ids):
    """Change the ids of the method's clients, so that ids are not positions."""
    method.ctx = replace(method.ctx, clients=tuple(ids))
    return method


def trainable(ctx, tree):
    """Return the entries of the tree that are trained."""
    return T.keep(tree, ctx.net.trainable.__contains__)


def gradient(ctx, tree, x, y):
    """Return the gradient of the cross-entropy by every entry; None for entries that are not trained."""
    leaves = {k: v.clone().requires_grad_(k in ctx.net.trainable) for k, v in tree.items()}
    F.cross_entropy(ctx.forward(leaves, x), y).backward()
    return {k: leaves[k].grad for k in tree}


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
    """Return a loop that has not run."""
    data = data or clients()
    method = bind(cls, own, model=model, data=data, **ctx)
    folder = Folder(tmp / f"toy{next(_count)}")
    rules = Rules(method.ctx.seed, dropout, stragglers, watch)
    schedule = Schedule(method.ctx.planned_rounds, rules, eval_every=1, checkpoint_every=1, final_trained=False)
    doing = Clients(method, data, Optimiser(optimizer, momentum, weight_decay))
    states = ClientStates(folder.path, len(data.parts), disk)

    def cost(client):
        return len(data.parts[client][1])

    runtime = Workers(doing, states, workers, cost) if workers > 1 else Inline(doing, states, cost)
    _folders.append(folder)
    return Loop(method, runtime, folder, schedule)


def close_folders() -> None:
    """Close the folders that a test has opened; a second close does nothing."""
    while _folders:
        _folders.pop().close()


def play(cls, tmp: Path, own=None, **settings) -> Loop:
    """Run a toy federation to its end."""
    return testing.play(open_toy(cls, tmp, own, **settings))


def begin(loop: Loop) -> Loop:
    """Start a loop without running it, for tests that call `loop.step()`."""
    loop.start()
    return loop


def rounds(loop: Loop, n: int = 1) -> Loop:
    """Run `n` more rounds."""
    for _ in range(n):
        loop.step()
    return loop


def state(loop: Loop, client: int):
    """Return the stored state of a client; None if it has none."""
    return loop.runtime.states.get(client)


def handed(loop: Loop, client: int) -> T.Tree:
    """Return the download of a client in the next round as one tree."""
    shared, own = preview(loop.method, loop.server, loop.edges, [client], loop.done + 1)[client]
    return {**shared, **own}


def events(loop: Loop) -> list[dict]:
    return testing.events(loop.folder.path)


def models(loop: Loop) -> dict:
    """Return the personal model of every client."""
    method, data, out = loop.method, loop.runtime.clients.federation, {}
    for i, (shared, own) in preview(method, loop.server, loop.edges, method.ctx.clients, loop.done + 1).items():
        kept = state(loop, i)
        kept = method.init_client(data.data(i)) if kept is None else kept
        out[i] = method.personal(kept, {**shared, **own}, data.data(i))[0]
    return out


def same(a, b) -> bool:
    """True if two trees, or dictionaries of trees, have the same names and bits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return torch.equal(a, b)


def near(a, b, atol=1e-6) -> bool:
    """True if two trees differ by at most `atol`."""
    return a.keys() == b.keys() and all(torch.allclose(v, b[k], atol=atol, rtol=0) for k, v in a.items())


def planted(groups: int = 2, each: int = 3) -> Toy:
    """Return groups of clients whose labels are shifted by the number of the group; ids of a group are not adjacent."""
    rng = torch.Generator().manual_seed(5)
    parts = []
    for i in range(groups * each):
        x = torch.randn(20, 4, generator=rng)
        parts.append((x, (x[:, :3].argmax(1) + i % groups) % 3))
    return Toy(parts, 3)


def uploads(trees, ids=None):
    return [Upload(t, {}, i, 10) for i, t in zip(ids or range(len(trees)), trees, strict=True)]


def moved(method, vectors):
    """Return w0 + v for each vector v [P] over all entries."""
    return [T.add(method.ctx.w0, T.unflatten(v, method.ctx.w0)) for v in vectors]
