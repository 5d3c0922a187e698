"""FedNH: the head is a set of unit prototypes that only the server moves."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import (
    CODE,
    About,
    Case,
    Result,
    World,
    average,
    body,
    body_tree,
    class_means,
    copied,
    features,
    head,
    head_names,
    load,
    tensors,
)

ABOUT = About(CODE, ("the scale is fixed (`learn_scale`)",))


def reference(
    world: World, rho: float = 0.9, scale: float = 30.0, clip: float = 10.0, server_lr: float = 1.0
) -> Result:
    server = world.module()
    width = head(server).in_features
    draw = torch.randn(world.classes, width, generator=world.rng("prototypes"), dtype=torch.float64)
    head(server).weight.data = torch.linalg.qr(draw.T).Q.T.float().contiguous()
    head(server).bias.data.zero_()
    last = {}
    for t in range(1, world.rounds + 1):
        ids, means, P = world.sampled(t), {}, head(server).weight.data
        for i in ids:
            model = copied(server)
            opt = world.optimiser(list(body(model).parameters()), t)
            for x, y in world.batches(t, i):
                opt.zero_grad()
                F.cross_entropy(_logits(body(model)(x), P, scale), y).backward()
                nn.utils.clip_grad_norm_(body(model).parameters(), clip)
                opt.step()
            last[i] = model
            x, y = world.train_part(i)
            means[i] = class_means(F.normalize(features(model, x), dim=1), y)
        mean = average([body_tree(last[i]) for i in ids])
        new = P.clone()
        for k in range(world.classes):
            have = [i for i in ids if k in means[i]]
            if have:
                counts = [int((world.train_part(i)[1] == k).sum()) for i in have]
                total = sum(n * F.normalize(means[i][k], dim=0) for n, i in zip(counts, have, strict=True))
                new[k] = F.normalize(rho * P[k] + (1 - rho) * F.normalize(total, dim=0), dim=0)
        old = body_tree(server)
        load(server, {k: old[k] + server_lr * (v - old[k]) for k, v in mean.items()} | {head_names(server)[0]: new})
    clients = {i: last.get(i, server) for i in world.clients}
    logits = {}
    for i, model in clients.items():
        logits[i] = _logits(features(model, world.test_part(i)[0]), head(model).weight.data, scale)
    return Result({i: tensors(m) for i, m in clients.items()}, tensors(server), logits=logits)


def _logits(z: Tensor, P: Tensor, scale: float) -> Tensor:
    return scale * F.normalize(z, dim=1) @ P.T


CASES = [
    Case("fednh", reference, {"scale": 10.0, "rho": 0.6}),
    Case("fednh", reference, {"clip": 0.5, "server_lr": 0.7}, models=("cnn",), tag="clip"),
]
