"""Local-Only: everybody trains a model of its own, when it is sampled."""

from reference import PAPER, About, Case, Result, World

ABOUT = About(PAPER, ("a client trains only in rounds in which it is sampled, so that its work is that of others",))


def reference(world: World) -> Result:
    own = {i: world.module() for i in world.clients}
    for t in range(1, world.rounds + 1):
        for i in world.sampled(t):
            world.fit(own[i], t, i)
    return Result(own)


CASES = [Case("local", reference, run={"momentum": 0.9})]
