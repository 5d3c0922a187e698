"""FedCP: a policy splits features between the client's own head and the frozen received one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, body, copied, head, head_names, linear, load, tensors

ABOUT = About(
    CODE,
    (
        "the context of a client's first round is made from its own head, not random",
        "scored without Gumbel noise",
        "batch-norm statistics travel (`bn_stats = local`)",
        "a client that is not sampled is scored with the newest policy and global head, not with its previous ones",
    ),
)


class Policy(nn.Module):
    def __init__(self, width: int, rng: torch.Generator):
        super().__init__()
        self.first, self.norm = linear(rng, width, 2 * width), nn.LayerNorm(2 * width)

    def forward(self, z: Tensor) -> Tensor:
        return F.relu(self.norm(self.first(z))).view(len(z), 2, -1)


def reference(world: World, lam: float = 5.0, tau: float = 1.0, reference: str = "training") -> Result:
    server = world.module()
    policy = Policy(head(server).in_features, world.rng("policy"))
    own = {i: copied(head(server)) for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids, models, policies = world.sampled(t), [], []
        for i in ids:
            model, frozen, gate, mine = copied(server), copied(server), copied(policy), own[i]
            frozen.train(reference == "training")
            context = _context(mine)
            moved = [*body(model).parameters(), *gate.parameters(), *mine.parameters()]
            opt = world.optimiser(moved, t)
            world.noise(t, i)
            for x, y in world.batches(t, i):
                z = body(model)(x)
                with torch.no_grad():
                    old = body(frozen)(x)
                r, s = F.gumbel_softmax(gate(z * context), tau, dim=1).unbind(1)
                loss = F.cross_entropy(mine(r * z) + head(frozen)(s * z), y) + lam * _mmd(z, old)
                opt.zero_grad()
                loss.backward()
                opt.step()
            for p, q in zip(head(model).parameters(), mine.parameters(), strict=True):
                p.data = (p.data + q.data) / 2
            models.append(model)
            policies.append(gate)
        sizes = [world.sizes[i] for i in ids]
        load(server, average(models, sizes))
        load(policy, average(policies, sizes))
    clients, logits = {}, {}
    last = head_names(server)[0].removesuffix("weight")
    gate = {k.replace("first", "q:1").replace("norm", "q:2"): v for k, v in tensors(policy).items()}
    server.eval()
    for i in world.clients:
        mine = {f"p:{last}{k}": v for k, v in tensors(own[i]).items()}
        clients[i] = {**tensors(server), **gate, **mine}
        with torch.no_grad():
            z = body(server)(world.test_part(i)[0])
            r, s = (policy(z * _context(own[i])) / tau).softmax(1).unbind(1)
            logits[i] = own[i](r * z) + head(server)(s * z)
    return Result(clients, logits=logits)


def _context(layer: nn.Linear) -> Tensor:
    return F.normalize(layer.weight.detach().sum(0), dim=0)


def _mmd(a: Tensor, b: Tensor) -> Tensor:
    def kernel(u: Tensor, v: Tensor) -> Tensor:
        far = (u[:, None] - v[None]).square().sum(-1)
        return torch.stack([torch.exp(-far / (2 * width)) for width in (10, 15, 20, 50)]).sum(0)

    return (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)).mean()


CASES = [
    Case("fedcp", reference, {"lam": 5.0}),
    Case("fedcp", reference, {"lam": 2.0, "tau": 0.7, "reference": "evaluation"}, models=("cnn",), tag="evaluation"),
]
