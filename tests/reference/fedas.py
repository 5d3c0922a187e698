"""FedAS: the received body is aligned with the class means of the client's last model; averaging by Fisher traces."""

import torch
import torch.nn.functional as F
from torch import nn

from reference import CODE, About, Case, Result, World, average, body, copied, head, load, tensors

ABOUT = About(CODE, ("alignment with the run's batches (16 there) and batch norm in training mode",))


def fisher(model: nn.Module, world: World, client: int) -> float:
    model, total = copied(model).eval(), 0.0
    x, y = world.train_part(client)
    for a in range(0, len(y), world.batch):
        loss = F.nll_loss(F.log_softmax(model(x[a : a + world.batch]), 1), y[a : a + world.batch])
        total += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(model.parameters())))
    return total


def reference(world: World, align_lr: float, align_epochs: int = 1) -> Result:
    server, last = world.module(), {i: world.module() for i in world.clients}
    ever = set()
    for t in range(1, world.rounds + 1):
        ids, traces = world.sampled(t), []
        for i in ids:
            model, (x, y) = copied(server), world.train_part(i)
            load(model[-1], tensors(head(last[i])))
            with torch.no_grad():
                z = body(copied(last[i]).eval())(x)
            means = {k: z[y == k].mean(0) for k in y.unique().tolist()}
            opt = torch.optim.SGD(body(model).parameters(), lr=align_lr)
            for bx, by in world.batches(t, i, align_epochs, stream=1):
                out = body(model)(bx)
                opt.zero_grad()
                sum(F.mse_loss(out[by == k], means[k].expand_as(out[by == k])) for k in by.unique().tolist()).backward()
                opt.step()
            last[i] = world.fit(model, t, i)
            traces.append(fisher(model, world, i))
        ever |= set(ids)
        mean = average([last[i] for i in ids], traces)
        load(server, {k: v for k, v in mean.items() if k in dict(body(server).state_dict())})
    fresh = copied(server)
    load(fresh[-1], tensors(head(world.module())))
    return Result({i: last[i] if i in ever else fresh for i in world.clients})


CASES = [
    Case("fedas", reference, {"align_lr": 0.01}),
    Case("fedas", reference, {"align_lr": 0.1}, {"epochs": 2}, models=("mlp",), tag="strong"),
]
