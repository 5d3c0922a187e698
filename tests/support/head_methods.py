"""Helpers for tests of methods with heads, prototypes or second models."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.method import Batch, ClientData, Extras, Method, Moment, Start, Upload
from coterie.core.tree import Tree
from coterie.engine.loop import Loop
from coterie.testing import Bench
from coterie.train.optimisers import Optimiser
from coterie.train.trainer import train
from support.toy import same as same
from support.toy import state as state

D, K = 16, 10  # width of the features and number of classes of the model of testing.Bench


def bound(cls: type[Method], run: dict[str, Any] | None = None, **own: Any) -> tuple[Method, list[ClientData]]:
    """Return a method with its context, and the data of the clients."""
    session = Bench(cls, own).session(**(run or {}))
    return session.method, [session.federation.data(i) for i in session.federation.clients]


def play(cls: type[Method], folder: Path, run: dict[str, Any] | None = None, **own: Any) -> Loop:
    return Bench(cls, own).play(folder / f"{cls.__name__}-{len(list(folder.iterdir()))}", **(run or {}))


def opened(method: Method, data: ClientData) -> tuple[Tree, Extras]:
    """Return the parameters and extras with which a client starts round 1."""
    down = method.down(method.setup(), [data.client], 1).to(data.client)
    return method.begin(method.init_client(data), down, data, 1).model


def round_of(method: Method, data: ClientData, rule: Optimiser | None = None) -> tuple[Tree, Extras, Upload]:
    """Run the first round of a client; return parameters and extras after training, and the upload."""
    params, extras = opened(method, data)
    trained, _ = train(method.ctx, rule or Optimiser(), method.phases(1), Start(params, extras), data, 1)
    with torch.no_grad():
        _, upload = method.end(method.init_client(data), trained, data, 1)
    return trained.params, trained.extras, Upload(upload.tree, upload.note, data.client, len(data.train))


def batch_of(data: ClientData, n: int = 24) -> Batch:
    return Batch(data.train.x[:n], data.train.y[:n])


def class_means(method: Method, params: Tree, data: ClientData) -> dict[int, Tensor]:
    """Return the mean feature vector of each class in the client's training data."""
    z = method.ctx.features(params, data.train.x)
    return {k: z[data.train.y == k].mean(0) for k in data.train.y.unique().tolist()}


def gradients(method: Method, params: Tree, batch: Batch, extras: Extras) -> dict[str, Tensor | None]:
    """Return the gradient of the method's loss in training mode by every entry."""
    stats = method.ctx.group("bn_stats")
    leaves = {
        k: v.detach().clone().requires_grad_(k.rsplit(":", 1)[-1] not in stats and v.is_floating_point())
        for k, v in params.items()
    }
    torch.manual_seed(0)
    with method.ctx.net.train_mode():
        loss = method.loss(leaves, batch, extras)
    names = [k for k, v in leaves.items() if v.requires_grad]
    got = torch.autograd.grad(loss, [leaves[k] for k in names], allow_unused=True)
    return dict(zip(names, got, strict=True))


def value(method: Method, params: Tree, batch: Batch, extras: Extras) -> Tensor:
    """Return the method's loss in evaluation mode."""
    torch.manual_seed(0)
    loss = method.loss(params, batch, extras)
    assert isinstance(loss, Tensor)
    return loss


def declared(method: Method, labels: int, round: int = 1) -> tuple[int, int]:
    """Return the declared bytes up and down of the first client if it has `labels` classes."""
    now = Moment(method.setup(), method.ctx.clients[0], round)
    return method.schema("up", now).nbytes(labels=labels), method.schema("down", now).nbytes(labels=labels)


def scalars(method: Method, group: str) -> int:
    return sum(method.ctx.w0[k].numel() for k in method.ctx.group(group))


def noisy(tree: Tree, names: Any, seed: int = 1) -> Tree:
    """Return the tree with noise in the entries for which `names` is true."""
    rng = torch.Generator().manual_seed(seed)
    return {k: v + torch.randn(v.shape, generator=rng) if names(k) else v for k, v in T.clone(tree).items()}
