"""FedPav: the classifier stays with the client; clients count by samples or by the change of their outputs."""

import torch
import torch.nn.functional as F

from reference import CODE, About, Case, Result, World, average, body_tree, copied, evaluated, load

ABOUT = About(CODE, ("no distillation on public data at the server",))


def reference(world: World, cosine_weight: bool = False) -> Result:
    server, own = world.module(), {i: world.module() for i in world.clients}
    for t in range(1, world.rounds + 1):
        ids, weights = world.sampled(t), []
        for i in ids:
            load(own[i], body_tree(server))
            order = torch.randperm(world.sizes[i], generator=world.rng("cosine", t, i))
            x = world.train_part(i)[0][order[: world.batch]]
            before = evaluated(own[i], x)
            world.fit(own[i], t, i)
            changed = float((1 - F.cosine_similarity(before, evaluated(own[i], x))).mean())
            weights.append(changed if cosine_weight else float(world.sizes[i]))
        load(server, average([body_tree(own[i]) for i in ids], weights))
    return Result({i: load(copied(own[i]), body_tree(server)) for i in world.clients})


CASES = [Case("fedpav", reference), Case("fedpav", reference, {"cosine_weight": True}, tag="cosine")]
