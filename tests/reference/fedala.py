"""FedALA: the received model is merged into the client's own by weights that are learned first."""

import torch
from torch import nn

from reference import BOTH, About, Case, Result, World, average, ce, copied, load, tensors

ABOUT = About(
    BOTH,
    (
        "weights are learned on a random subset, as the paper says (`draw = window`)",
        "only participants receive and merge (`merge = everybody`)",
        "learning the weights ends after `max_epochs`",
    ),
)


def reference(
    world: World, window: int = 10, threshold: float = 0.1, max_epochs: int = 100, share: float = 0.8, eta: float = 1.0,
    draw: str = "subset", merge: str = "participants",
) -> Result:  # fmt: skip
    server, own, A, settled = world.module(), {}, {}, set()
    names = [k for k, _ in list(server.named_parameters())[-2:]]  # weight and bias of the last layer

    def merged(i: int, t: int) -> tuple[nn.Module, dict]:
        """The model a client starts from, and its weights."""
        if i not in own:
            return copied(server), {k: torch.ones_like(tensors(server)[k]) for k in names}
        rng, n, weights, losses = world.rng("ala", t, i), world.sizes[i], dict(A[i]), []
        size = max(1, int(share * n))
        if draw == "window":
            first = int(torch.randint(n - size + 1, (), generator=rng))
            drawn = torch.arange(first, first + size)
        else:
            drawn = torch.randperm(n, generator=rng)[:size]
        x, y = world.train_part(i)
        model, old, new = copied(server).eval(), tensors(own[i]), tensors(server)
        while True:
            for part in drawn.split(world.batch):
                load(model, {k: old[k] + (new[k] - old[k]) * weights[k] for k in names})
                model.zero_grad()
                loss = ce(model, x[part], y[part])
                loss.backward()
                slope = {k: p.grad for k, p in model.named_parameters()}
                for k in names:
                    weights[k] = (weights[k] - eta * slope[k] * (new[k] - old[k])).clamp(0, 1)
            losses.append(loss.item())
            calm = len(losses) > window and float(torch.tensor(losses[-window:]).std(correction=0)) < threshold
            if i in settled or calm or len(losses) == max_epochs:
                break
        load(model, {k: old[k] + (new[k] - old[k]) * weights[k] for k in names})
        return model.train(), weights

    for t in range(1, world.rounds + 1):
        ids, uploads = world.sampled(t), []
        for i in world.clients if merge == "everybody" else ids:
            known = i in own
            model, weights = merged(i, t)
            if i in ids:
                uploads.append(world.fit(model, t, i))
            A[i] = weights
            if known:
                settled.add(i)
            own[i] = model
        server = load(copied(server), average(uploads, [world.sizes[i] for i in ids]))
    if merge == "everybody":
        return Result({i: merged(i, world.rounds + 1)[0] for i in world.clients}, server)
    return Result({i: own.get(i, server) for i in world.clients}, server)


LONG = {"rounds": 5, "lr": 0.2}  # so that some take part for the third time
CASES = [
    Case("fedala", reference, {"window": 3, "threshold": 10.0}, LONG, long=("cnn",)),
    Case("fedala", reference, {"draw": "window", "merge": "everybody", "threshold": 10.0}, tag="authors"),
]
