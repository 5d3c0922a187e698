"""FedPer: the last layers stay with the client; everything is trained together."""

from reference import PAPER, About, Case, Result, World, average, copied, load, tensors

ABOUT = About(PAPER, ("no code of the authors was found; weighting by samples",))


def reference(world: World, layers: int = 1) -> Result:
    server, own = world.module(), {i: world.module() for i in world.clients}
    weighty = [k.rsplit(".", 1)[0] for k, p in server.named_parameters() if p.ndim > 1]
    first = int(weighty[-layers])
    shared = [k for k in tensors(server) if int(k.split(".")[0]) < first]
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        for i in ids:
            load(own[i], {k: tensors(server)[k] for k in shared})
            world.fit(own[i], t, i)
        mean = average([own[i] for i in ids], [world.sizes[i] for i in ids])
        load(server, {k: mean[k] for k in shared})
    return Result({i: load(copied(own[i]), {k: tensors(server)[k] for k in shared}) for i in world.clients})


CASES = [Case("fedper", reference), Case("fedper", reference, {"layers": 2}, tag="two layers", long=("cnn",))]
