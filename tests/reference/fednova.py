"""FedNova: changes are divided by the weight of gradients in them, and the mean multiplied by the mean weight."""

from reference import BOTH, About, Case, Result, World, average, ce, copied, load, tensors

ABOUT = About(BOTH, ("no proximal term, no server momentum (options of the authors' code)",))


def reference(world: World) -> Result:
    server = world.module()
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        share = [world.sizes[i] / sum(world.sizes[j] for j in ids) for i in ids]
        local, weight = [], []
        for i in ids:
            model, counter, total = copied(server), 0.0, 0.0
            opt = world.optimiser(model.parameters(), t)
            for x, y in world.batches(t, i):
                opt.zero_grad()
                ce(model, x, y).backward()
                opt.step()
                counter = counter * world.momentum + 1  # as the authors count
                total += counter
            local.append(model)
            weight.append(total)
        effective = sum(p * a for p, a in zip(share, weight, strict=True))
        old, mean = {k: v.clone() for k, v in tensors(server).items()}, average(local, share)
        for k, _ in server.named_parameters():
            steps = [(old[k] - tensors(m)[k]) / a for m, a in zip(local, weight, strict=True)]
            mean[k] = old[k] - effective * sum(p * d for p, d in zip(share, steps, strict=True))
        load(server, mean)
    return Result(dict.fromkeys(world.clients, server), server)


CASES = [
    Case("fednova", reference),
    Case("fednova", reference, run={"momentum": 0.9, "epochs": 2, "lr": 0.05}, tag="momentum"),
]
