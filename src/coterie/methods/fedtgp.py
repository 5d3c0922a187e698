"""FedTGP. Zhang, Liu, Hua, Cao, AAAI 2024 (arXiv 2401.03230).

FedProto whose global prototypes are not means: the server makes them from class embeddings with a small network, which
it trains so that each client's class mean is closest to the prototype of its class, by a margin that is the largest of
the distances between classes and their nearest neighbours, at most `margin`. So models of clients may differ.
`server_epochs` is the paper's 100 (1000 in the authors' code). The nearest prototype of all classes is the prediction.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, State
from coterie.core.method import Card, Start, Upload
from coterie.core.tree import Tree
from coterie.methods.fedproto import FedProto, FedProtoSettings
from coterie.parts.prototypes import class_means
from coterie.parts.small_layers import linear, run_linear

SMALLEST_DISTANCE = 1e-6  # least distance, for a finite gradient


class FedTGPSettings(FedProtoSettings):
    decide: Literal["head", "nearest"] = Field("nearest", description="predict by the head or by the nearest prototype")
    margin: float = Field(100.0, ge=0, description="largest margin between a class and the others")
    server_epochs: int = Field(100, ge=1, description="passes of the server over the received class means")
    server_lr: float | None = Field(None, gt=0, description="rate of the server; empty: the run's")


class FedTGP(FedProto):
    Settings = FedTGPSettings
    hp: FedTGPSettings
    card = Card(
        "FedTGP",
        "Zhang et al., AAAI 2024, arXiv 2401.03230",
        2024,
        "P,R",
        personal="the whole model",
        compute="a forward pass over the training part; the server trains a small network on the class means",
    )

    def setup(self) -> State:
        d, rng = self.ctx.net.width, self.ctx.rng("prototypes")
        net = {"embedding": torch.randn(self.ctx.classes, d, generator=rng)}
        return {**super().setup(), "net": {**net, **linear("1", d, d, rng), **linear("2", d, d, rng)}}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        return start.adding(known=start.extras["mask"])

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        y = torch.cat([u.tree["x:labels"] for u in uploads]).long()
        if not len(y):
            return server
        z = torch.cat([u.tree["x:means"] for u in uploads])
        margin = min(self.hp.margin, widest_gap(z, y, self.ctx.classes))
        net, lr = server["net"], self.ctx.lr_at(round) if self.hp.server_lr is None else self.hp.server_lr

        for epoch in range(self.hp.server_epochs):
            order = torch.randperm(len(y), generator=self.ctx.rng("server", round, epoch))
            for part in torch.split(order, self.ctx.batch):
                net = T.add(net, slope(net, z[part], y[part], margin), -lr)
        return {"prototypes": made(net), "net": net}


def made(net: Tree) -> Tensor:
    """Return the prototypes [classes, d]."""
    return run_linear(net, "2", run_linear(net, "1", net["embedding"]).relu())


def widest_gap(z: Tensor, y: Tensor, classes: int) -> float:
    """Return the largest distance of a class mean to its nearest neighbour; infinite with fewer than two classes."""
    means, mask = class_means(z, y, classes)
    far = torch.cdist(means[mask], means[mask]).fill_diagonal_(torch.inf)
    return float(far.min(1).values.max())


def slope(net: Tree, z: Tensor, y: Tensor, margin: float) -> Tree:
    """Return the gradient of the server's loss, written out because it is computed thousands of times per round.

    The loss is the mean cross-entropy over minus the distances of z [batch, d] to the prototypes, with the margin added
    at the sample's own class.
    """
    hidden = run_linear(net, "1", net["embedding"]).relu()
    prototypes = run_linear(net, "2", hidden)
    far = torch.cdist(z, prototypes).clamp(min=SMALLEST_DISTANCE)  # [batch, classes]
    own = F.one_hot(y, len(prototypes)).to(z)
    push = (own - (-far - margin * own).softmax(1)) / (far * len(z))  # d loss / d distance, over the distance
    back = push.sum(0)[:, None] * prototypes - push.T @ z  # [classes, d]
    inner = (back @ net["2.weight"]) * (hidden > 0)
    return {
        "embedding": inner @ net["1.weight"],
        "1.weight": inner.T @ net["embedding"],
        "1.bias": inner.sum(0),
        "2.weight": back.T @ hidden,
        "2.bias": back.sum(0),
    }
