"""FedAvg: local training from the server's model, mean by sample counts."""

from reference import BOTH, About, Case, Result, World, average, copied, load

ABOUT = About(BOTH)


def reference(world: World, weighting: str = "samples") -> Result:
    server = world.module()
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        local = [world.fit(copied(server), t, i) for i in ids]
        load(server, average(local, [world.sizes[i] for i in ids] if weighting == "samples" else None))
    return Result(dict.fromkeys(world.clients, server), server)


CASES = [
    Case("fedavg", reference),
    Case(
        "fedavg", reference, run={"momentum": 0.9, "weight_decay": 0.01, "lr_decay": 0.9, "epochs": 2}, tag="momentum"
    ),
    Case("fedavg", reference, run={"optimizer": "adam", "lr": 0.01}, models=("mlp",), tag="adam"),
]
