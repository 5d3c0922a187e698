"""FedDPA: FedAvg, and a second model of the client's own that is mixed with it by the likeness of each item."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import BOTH, About, Case, Result, World, average, copied, evaluated, head, load

ABOUT = About(
    BOTH,
    (
        "both adapters have a head, which the paper's models lack",
        "an item is compared with the same training samples each time",
        "without adapters in the model, complete models are mixed by their outputs",
    ),
)


def reference(world: World, share: float = 0.5, most: float = 0.5, compared: int = 5) -> Result:
    server, own = world.module(), {}
    for t in range(1, world.rounds + 1):
        ids, local = world.sampled(t), []
        for i in ids:
            if t > 1:
                own.setdefault(i, world.module())
                received = copied(server).eval()

                def mixed(model: nn.Module, x: Tensor, y: Tensor, received: nn.Module = received) -> Tensor:
                    with torch.no_grad():
                        fixed = received(x)
                    return F.cross_entropy((1 - share) * fixed + share * model(x), y)

                world.fit(own[i], t, i, mixed)
            local.append(world.fit(copied(server), t, i))
        load(server, average(local, [world.sizes[i] for i in ids]))
    logits = {}
    for i in world.clients:
        x = world.test_part(i)[0]
        logits[i] = evaluated(server, x)
        if i in own:
            train = world.train_part(i)[0]
            rows = torch.randperm(len(train), generator=world.rng("feddpa", i))[:compared]
            known, new = _features(own[i], train[rows]), _features(own[i], x)
            likeness = torch.stack([F.cosine_similarity(new, k[None]) for k in known]).mean(0)
            part = (most * likeness)[:, None]
            logits[i] = (1 - part) * logits[i] + part * evaluated(own[i], x)
    return Result(whole=server, states={i: {"local": own[i]} for i in own}, logits=logits)


def _features(model: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of the last layer."""
    seen: list[Tensor] = []
    handle = head(model).register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    evaluated(model, x)
    handle.remove()
    return seen[0]


CASES = [
    Case("feddpa", reference, {}, {"epochs": 2}),
    Case("feddpa", reference, {"share": 0.3, "most": 0.8}, tag="set"),
]
