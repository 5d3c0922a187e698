"""FedRep: first the head with the body frozen, then the body with the head frozen; heads stay with their clients."""

from torch import nn

from reference import CODE, About, Case, Result, World, average, body, copied, head, load, tensors

ABOUT = About(
    CODE,
    (
        "batch norm of the frozen body stands still in the head phase",
        "no last round of the heads alone (`final_epochs`, view `adapted`)",
        "a client that was never sampled has the initial head, not the mean of the other clients' heads",
        "the frozen head does not drift by momentum, as it did with the PyTorch of that time",
        "mean by samples (`weighting = uniform` as for their CIFAR and MNIST)",
    ),
)


def reference(
    world: World, head_epochs: int = 4, body_epochs: int = 1, final_epochs: int = 0, weighting: str = "samples"
) -> Result:
    server, own = world.module(), {i: world.module() for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        for i in ids:
            load(body(own[i]), tensors(body(server)))
            _fit_head(world, own[i], t, i, head_epochs)
            world.fit(own[i], t, i, params=list(body(own[i]).parameters()), epochs=body_epochs)
        mean = average([body(own[i]) for i in ids], [world.sizes[i] for i in ids] if weighting == "samples" else None)
        load(body(server), mean)
    for i in world.clients:
        load(body(own[i]), tensors(body(server)))
    adapted = {i: _fit_head(world, copied(own[i]), world.rounds + 1, i, final_epochs) for i in world.clients}
    return Result(own, adapted=adapted if final_epochs else {})


def _fit_head(world: World, model: nn.Module, t: int, i: int, epochs: int) -> nn.Module:
    body(model).eval()
    world.fit(model, t, i, params=list(head(model).parameters()), epochs=epochs)
    return model.train()


CASES = [
    Case("fedrep", reference, {"head_epochs": 2}, {"momentum": 0.5}),
    Case(
        "fedrep",
        reference,
        {"head_epochs": 2, "body_epochs": 2, "final_epochs": 3},
        {"weighting": "uniform"},
        tag="authors",
    ),
]
