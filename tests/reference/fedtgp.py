"""FedTGP: prototypes from embeddings through two layers, trained on the server with a margin."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.rng import torch_rng
from reference import CODE, About, Case, Result, World, body, copied, head

ABOUT = About(CODE, ("100 passes on the server, as in the paper (1000 in the code)",))


class Prototypes(nn.Module):
    def __init__(self, classes: int, d: int):
        super().__init__()
        rng = torch_rng(0, "prototypes")
        self.embedding = nn.Parameter(torch.randn(classes, d, generator=rng))
        self.one, self.two = nn.Linear(d, d), nn.Linear(d, d)
        for layer in (self.one, self.two):
            for p in (layer.weight, layer.bias):
                p.data = (torch.rand(p.shape, generator=rng) * 2 - 1) / d**0.5

    def forward(self) -> Tensor:
        out: Tensor = self.two(F.relu(self.one(self.embedding)))
        return out


def reference(world: World, lam: float, server_epochs: int, margin: float, decide: str = "nearest") -> Result:
    own = {i: world.module() for i in world.clients}
    net, prototypes = Prototypes(world.classes, head(world.module()).in_features), None
    for t in range(1, world.rounds + 1):
        sent = []
        for i in world.sampled(t):

            def loss(model: nn.Module, x: Tensor, y: Tensor, pull: Tensor | None = prototypes) -> Tensor:
                z = body(model)(x)
                ce = F.cross_entropy(head(model)(z), y)
                return ce if pull is None else ce + lam * F.mse_loss(z, pull[y])

            world.fit(own[i], t, i, loss)
            x, y = world.train_part(i)
            with torch.no_grad():
                z = body(copied(own[i]).eval())(x)
            sent += [(z[y == k].mean(0), k) for k in y.unique().tolist()]
        z, y = torch.stack([m for m, _ in sent]), torch.tensor([k for _, k in sent])
        means = torch.stack([z[y == k].mean(0) for k in y.unique().tolist()])
        far = [[float((a - b).norm()) for b in means] for a in means]
        widest = max(min(d for j, d in enumerate(row) if j != i) for i, row in enumerate(far))
        opt = torch.optim.SGD(net.parameters(), lr=world.rate(t))
        for epoch in range(server_epochs):
            order = torch.randperm(len(y), generator=torch_rng(0, "server", t, epoch))
            for part in order.split(world.batch):
                dist = (z[part][:, None] - net()[None]).norm(dim=2)
                dist = dist + F.one_hot(y[part], world.classes) * min(widest, margin)
                opt.zero_grad()
                F.cross_entropy(-dist, y[part]).backward()
                opt.step()
        prototypes = net().detach()
    assert prototypes is not None
    logits = {}
    for i in world.clients:
        with torch.no_grad():
            z = body(copied(own[i]).eval())(world.test_part(i)[0])
            logits[i] = -(z[:, None] - prototypes[None]).norm(dim=2)
    states = {i: {"own": own[i]} for i in world.clients}
    return Result(server={"prototypes": prototypes}, states=states, logits=logits)


CASES = [
    Case("fedtgp", reference, {"lam": 1.0, "server_epochs": 20, "margin": 100.0}),
    Case("fedtgp", reference, {"lam": 2.0, "server_epochs": 5, "margin": 0.5}, models=("mlp",), tag="small margin"),
]
