"""FedBABU: only the body is trained; everybody has the initial head; fine-tuning before use."""

from torch import nn

from reference import BOTH, About, Case, Result, World, average, body, body_tree, copied, head, load

ABOUT = About(BOTH, ("fine-tuning uses the run's rate (`finetune_lr`: 0.001 in the authors' code)",))


def reference(
    world: World, finetune_epochs: int = 0, finetune: str = "all", finetune_lr: float | None = None
) -> Result:
    server = world.module()
    for t in range(1, world.rounds + 1):
        local = [world.fit(m := copied(server), t, i, params=list(body(m).parameters())) for i in world.sampled(t)]
        load(server, average(local))
    adapted = {i: _tuned(world, copied(server), i, finetune_epochs, finetune, finetune_lr) for i in world.clients}
    return Result(dict.fromkeys(world.clients, server), server, {"w": body_tree(server)}, adapted=adapted)


def _tuned(world: World, model: nn.Module, i: int, epochs: int, what: str, lr: float | None) -> nn.Module:
    trained = head(model) if what == "head" else model
    if what == "head":
        body(model).eval()
    t = world.rounds + 1
    opt = world.optimiser(list(trained.parameters()), t, lr)
    for x, y in world.batches(t, i, epochs):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    return model


CASES = [
    Case("fedbabu", reference, {"finetune_epochs": 2, "finetune_lr": 0.03}, {"momentum": 0.9}),
    Case("fedbabu", reference, {"finetune_epochs": 3, "finetune": "head"}, models=("cnn",), tag="head"),
]
