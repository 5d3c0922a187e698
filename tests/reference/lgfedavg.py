"""LG-FedAvg: the body stays with its client, the head is averaged; before that, rounds of FedAvg."""

from reference import CODE, About, Case, Result, World, average, copied, head_tree, load

ABOUT = About(CODE, ("no rounds of FedAvg before the split (`warm_rounds`)",))


def reference(world: World, warm_rounds: int = 0) -> Result:
    server, own = world.module(), {}
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        warm = t <= warm_rounds
        local = {i: copied(server) if warm or i not in own else load(own[i], head_tree(server)) for i in ids}
        for i in ids:
            world.fit(local[i], t, i)
        own |= {} if warm else local
        mean = average([local[i] for i in ids])
        load(server, {k: v for k, v in mean.items() if warm or k in head_tree(server)})
    return Result({i: load(own.get(i, copied(server)), head_tree(server)) for i in world.clients})


CASES = [Case("lg-fedavg", reference), Case("lg-fedavg", reference, {"warm_rounds": 1}, tag="warm", long=("cnn",))]
