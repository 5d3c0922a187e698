"""pFedHN: the changes of the clients' models are gradients of a hyper-network, by the chain rule."""

import torch
from torch import Tensor, nn

from coterie.core.rng import torch_rng
from reference import CODE, About, Case, Result, World, average, copied, load, tensors

ABOUT = About(
    CODE,
    (
        "gradients of a round are averaged (one client per round there)",
        "embeddings start equal, the last layer at the run's first model (all drawn there)",
        "rate 0.5 without momentum and decay (server_lr = 0.01, server_momentum = 0.9, server_decay = 0.001 there)",
    ),
)


class Hyper(nn.Module):
    def __init__(self, clients: int, width: int, depth: int, first: Tensor):
        super().__init__()
        rng, e = torch_rng(0, "hyper-network"), 1 + clients // 4
        self.embedding = nn.Parameter(torch.randn(e, generator=rng).repeat(clients, 1))
        sizes = [(e, width), *[(width, width)] * depth, (width, len(first))]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)
        for layer, (a, _) in zip(self.layers, sizes, strict=True):
            for p in (layer.weight, layer.bias):
                p.data = (torch.rand(p.shape, generator=rng) * 2 - 1) / a**0.5
        self.layers[-1].bias.data = first

    def forward(self, client: int) -> Tensor:
        h = self.layers[0](self.embedding[client])
        for layer in self.layers[1:-1]:
            h = layer(torch.relu(h))
        out: Tensor = self.layers[-1](h)
        return out


def reference(
    world: World, width: int, depth: int, server_lr: float, server_momentum: float = 0.0, server_decay: float = 0.0
) -> Result:
    first = world.module()
    names = sorted(k for k, _ in first.named_parameters())
    flat = torch.cat([dict(first.named_parameters())[k].data.flatten() for k in names])
    hyper = Hyper(len(world.clients), width, depth, flat)
    opt = torch.optim.SGD(hyper.parameters(), server_lr, server_momentum, weight_decay=server_decay)
    stats = {k: v.clone() for k, v in tensors(first).items() if k not in names}

    def model(vector: Tensor) -> nn.Module:
        out, at = world.module(), 0
        mine = dict(out.named_parameters())
        for k in names:
            mine[k].data = vector[at : at + mine[k].numel()].view_as(mine[k]).clone()
            at += mine[k].numel()
        return load(out, stats)

    for t in range(1, world.rounds + 1):
        ids, local, surrogate = world.sampled(t), [], torch.zeros(())
        for i in ids:
            made = hyper(i)
            trained = world.fit(model(made.detach()), t, i)
            end = torch.cat([dict(trained.named_parameters())[k].data.flatten() for k in names])
            surrogate = surrogate + (made * (made.detach() - end)).sum() / len(ids)
            local.append(trained)
        opt.zero_grad()
        surrogate.backward()
        torch.nn.utils.clip_grad_norm_(hyper.parameters(), 50)
        opt.step()
        stats = {k: v for k, v in average(local).items() if k not in names}
    return Result({i: copied(model(hyper(i).detach())) for i in world.clients})


CASES = [
    Case("pfedhn", reference, {"width": 20, "depth": 2, "server_lr": 0.3}),
    Case(
        "pfedhn",
        reference,
        {"width": 10, "depth": 1, "server_lr": 0.1, "server_momentum": 0.9, "server_decay": 0.001},
        {"epochs": 2},
        tag="momentum",
    ),
]
