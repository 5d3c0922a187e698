"""FedGH: bodies stay at home; the server trains the head on the clients' class means."""

import torch
import torch.nn.functional as F

from reference import PAPER, About, Case, Result, World, class_means, copied, features, head, head_tree, load, tensors

ABOUT = About(
    PAPER,
    (
        "the server trains its own head; in the authors' script the optimiser seems to hold another network",
        "class means over samples, not of batch means",
        "scored before local training (`trained` is the authors' number)",
    ),
)


def reference(world: World, server_lr: float, server_epochs: int = 1, server_batch: int | None = None) -> Result:
    server, own = world.module(), {i: world.module() for i in world.clients}
    for t in range(1, world.rounds + 1):
        rows, labels = [], []
        for i in world.sampled(t):
            world.fit(load(own[i], head_tree(server)), t, i)
            x, y = world.train_part(i)
            for k, mean in class_means(features(own[i], x), y).items():
                rows.append(mean)
                labels.append(k)
        order = torch.randperm(len(rows), generator=world.rng("server", t))
        z, y = torch.stack(rows)[order], torch.tensor(labels)[order]
        opt = torch.optim.SGD(head(server).parameters(), server_lr)
        size = world.batch if server_batch is None else server_batch or len(y)
        for _ in range(server_epochs):
            for a, b in zip(z.split(size), y.split(size), strict=True):
                opt.zero_grad()
                F.cross_entropy(head(server)(a), b).backward()
                opt.step()
    clients = {i: load(copied(own[i]), head_tree(server)) for i in world.clients}
    return Result(clients, server={"w": {k: tensors(server)[k] for k in head_tree(server)}})


CASES = [
    Case("fedgh", reference, {"server_lr": 0.1}),
    Case("fedgh", reference, {"server_lr": 0.1, "server_epochs": 3, "server_batch": 0}, models=("mlp",), tag="full"),
]
