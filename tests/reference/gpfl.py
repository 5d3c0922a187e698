"""GPFL: a valve makes personal and global features; the global ones are matched with class embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, body, copied, features, head, linear, load, tensors

ABOUT = About(
    CODE,
    (
        "conditions are made from the embeddings just received; the authors' are those of a round ago, zeros at first",
        "the run's own weight decay is not used",
    ),
)


class Valve(nn.Module):
    def __init__(self, classes: int, width: int, rng: torch.Generator):
        super().__init__()
        self.classes = nn.Parameter(torch.randn(classes, width, generator=rng))
        self.gamma, self.gamma_norm = linear(rng, width, width), nn.LayerNorm(width)
        self.beta, self.beta_norm = linear(rng, width, width), nn.LayerNorm(width)

    def forward(self, z: Tensor, c: Tensor) -> Tensor:
        gamma, beta = self.gamma_norm(F.relu(self.gamma(c))), self.beta_norm(F.relu(self.beta(c)))
        return F.relu((gamma + 1) * z + beta)


def reference(world: World, lam: float = 0.01, mu: float = 0.1) -> Result:
    server, own = world.module(), {i: head(world.module()) for i in world.clients}
    valve = Valve(world.classes, head(server).in_features, world.rng("valve"))
    for t in range(1, world.rounds + 1):
        ids, models, valves = world.sampled(t), [], []
        for i in ids:
            model, mine = copied(server), copied(valve)
            received = mine.classes.detach().clone()
            common, personal = _conditions(world, i, received)
            opt = torch.optim.SGD(
                [
                    {"params": [*body(model).parameters(), *own[i].parameters()]},
                    {"params": list(mine.parameters()), "weight_decay": mu},
                ],
                world.rate(t),
                momentum=world.momentum,
            )
            for x, y in world.batches(t, i):
                z = body(model)(x)
                zp, zg = mine(z, personal), mine(z, common)
                cosine = F.normalize(zg, dim=1) @ F.normalize(mine.classes, dim=1).T
                loss = F.cross_entropy(own[i](zp), y) + F.cross_entropy(cosine, y)
                loss = loss + lam * torch.linalg.matrix_norm(zg - received[y])
                opt.zero_grad()
                loss.backward()
                opt.step()
            models.append(body(model))
            valves.append(mine)
        sizes = [world.sizes[i] for i in ids]
        load(body(server), average(models, sizes))
        load(valve, average(valves, sizes))
    logits = {}
    for i in world.clients:
        with torch.no_grad():
            z = features(server, world.test_part(i)[0])
            logits[i] = own[i](valve(z, _conditions(world, i, valve.classes)[1]))
    names = {"classes": "x:classes", "gamma_norm.": "x:gamma.norm.", "beta_norm.": "x:beta.norm."}
    names |= {"gamma.": "x:gamma.", "beta.": "x:beta."}
    extra = {}
    for k, v in tensors(valve).items():
        old = next(n for n in names if k.startswith(n))
        extra[k.replace(old, names[old])] = v
    number = len(server) - 1  # type: ignore[arg-type]
    clients = {}
    for i in world.clients:
        mine = {f"{number}.{k}": v for k, v in tensors(own[i]).items()}
        clients[i] = {**tensors(body(server)), **extra, **mine}
    return Result(clients, logits=logits)


def _conditions(world: World, i: int, C: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.bincount(world.train_part(i)[1], minlength=world.classes).float()
    return C.mean(0), (counts / counts.sum()) @ C


CASES = [Case("gpfl", reference, {"lam": 0.05}, {"momentum": 0.5})]
