"""pFedHN. Shamsian, Navon, Fetaya, Chechik, ICML 2021 (arXiv 2103.04628).

A network on the server, the hyper-network, makes each client's model from an embedding of that client; the
hyper-network itself never travels. A client trains the model it is sent, and its change, taken as a gradient with
respect to the model, moves hyper-network and embedding by the chain rule.
The gradients of a round's participants are averaged (the authors train one client per round). Embeddings start equal,
so that a client's model does not depend on its number; the last layer starts at the run's first model. The rate is high
and steps have no momentum and no weight decay by default, so that few rounds show something (0.01, 0.9 and 0.001 in the
authors' code); the norm of a gradient is at most 5 instead of 50, because larger steps at this rate can diverge. A
newcomer has the mean of all embeddings. Batch-norm statistics are averaged.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.method import Card, Download, Method, Settings, Upload
from coterie.core.states import state
from coterie.core.tree import Tree
from coterie.parts.small_layers import linear, run_linear


class PFedHNSettings(Settings):
    embedding: int | None = Field(None, ge=1, description="length of a client's embedding; empty: 1 + clients / 4")
    width: int = Field(100, ge=1, description="hidden units of the hyper-network")
    depth: int = Field(3, ge=0, description="hidden layers after the first")
    server_lr: float = Field(0.5, gt=0, description="rate of the hyper-network")
    server_momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the hyper-network")
    server_decay: float = Field(0.0, ge=0, description="weight decay of the hyper-network")
    server_clip: float | None = Field(5.0, gt=0, description="largest norm of its gradient; empty: none")


@state
class PFedHNServer:
    net: Tree  # the hyper-network; `embedding` [clients, e] is one of its entries
    momentum: Tree
    stats: Tree  # batch-norm statistics, which the hyper-network does not generate


class PFedHN(Method):
    Settings = PFedHNSettings
    hp: PFedHNSettings
    card = Card(
        "pFedHN",
        "Shamsian et al., ICML 2021, arXiv 2103.04628",
        2021,
        "M",
        personal="the whole model, made on the server",
        compute="as FedAvg on the client; the server takes a gradient of a network about 100 times as large as the"
        " model per participant",
    )
    weighting = "uniform"

    def setup(self) -> PFedHNServer:
        rng, n = self.ctx.rng("hyper-network"), len(self.ctx.clients)
        e = self.hp.embedding or 1 + n // 4
        net = {"embedding": torch.randn(e, generator=rng).repeat(n, 1), **linear("0", e, self.hp.width, rng)}
        for layer in range(1, self.hp.depth + 1):
            net |= linear(str(layer), self.hp.width, self.hp.width, rng)
        first = T.flatten(self._made())
        net |= {**linear("out", self.hp.width, len(first), rng), "out.bias": first}
        stats = {k: v.clone() for k, v in self.ctx.w0.items() if k not in self.ctx.net.trainable and not self.stays(k)}
        return PFedHNServer(net, {k: torch.zeros_like(v) for k, v in net.items()}, stats)

    def _made(self) -> Tree:
        """The initial values of the entries that the hyper-network generates."""
        return {k: v for k, v in self.ctx.w0.items() if k in self.ctx.net.trainable}

    def _row(self, client: int) -> int | None:
        """Return the row of the client's embedding; None for a newcomer."""
        return self.ctx.clients.index(client) if client in self.ctx.clients else None

    def generated(self, net: Tree, client: int) -> Tensor:
        """Return the client's parameters as one vector [P]."""
        row = self._row(client)
        h = net["embedding"].mean(0) if row is None else net["embedding"][row]
        h = run_linear(net, "0", h)
        for layer in range(1, self.hp.depth + 1):
            h = run_linear(net, str(layer), h.relu())
        return run_linear(net, "out", h)

    def down(self, server: PFedHNServer, ids: Sequence[int], round: int) -> Download:
        like = self._made()
        return Download(server.stats, {i: T.unflatten(self.generated(server.net, i), like) for i in ids})

    def aggregate(self, server: PFedHNServer, uploads: Sequence[Upload], round: int) -> PFedHNServer:
        like = self._made()
        with torch.no_grad():
            sent = {u.sender: self.generated(server.net, u.sender) for u in uploads}
        leaves = {k: v.detach().requires_grad_() for k, v in server.net.items()}
        total = [torch.zeros_like(v) for v in leaves.values()]
        for u, share in zip(uploads, T.normalised(self.weights(uploads), len(uploads)), strict=True):
            change = sent[u.sender] - T.flatten({k: u.tree[k] for k in like})
            with torch.enable_grad():
                made = self.generated(leaves, u.sender)
            torch._foreach_add_(total, torch.autograd.grad(made, list(leaves.values()), change), alpha=share)
        if self.hp.server_clip is not None:
            norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(total))))
            torch._foreach_mul_(total, min(1.0, self.hp.server_clip / (norm + 1e-6)))
        step = {k: g + self.hp.server_decay * server.net[k] for k, g in zip(leaves, total, strict=True)}
        momentum = T.add(step, server.momentum, self.hp.server_momentum)
        net = T.add(server.net, momentum, -self.hp.server_lr)
        stats = [{k: u.tree[k] for k in server.stats} for u in uploads]
        return PFedHNServer(net, momentum, T.mean(stats, self.weights(uploads)))
