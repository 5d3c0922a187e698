"""FedGKD: the mean of the last M global models teaches every client, from the second round on."""

import torch.nn.functional as F
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, copied, evaluated, load

ABOUT = About(
    CODE,
    (
        "mean by samples, as in the paper (`weighting = uniform`: as in the code)",
        "the teacher's batch norm uses its running statistics",
        "no FedGKD-VOTE, which needs validation data at the server",
    ),
)


def reference(world: World, gamma: float, models: int, temperature: float = 1.0, weighting: str = "samples") -> Result:
    server, past = world.module(), []  # type: ignore[var-annotated]
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        teacher = load(world.module(), average(past)) if past else None

        def loss(model: nn.Module, x: Tensor, y: Tensor, teacher: nn.Module | None = teacher) -> Tensor:
            out = model(x)
            if teacher is None:
                return F.cross_entropy(out, y)
            student, taught = (F.log_softmax(v / temperature, 1) for v in (out, evaluated(teacher, x)))
            far = F.kl_div(student, taught, log_target=True, reduction="batchmean")
            return F.cross_entropy(out, y) + gamma / 2 * temperature**2 * far

        local = [world.fit(copied(server), t, i, loss) for i in ids]
        load(server, average(local, [world.sizes[i] for i in ids] if weighting == "samples" else None))
        past = [*past, copied(server)][-models:]
    return Result(dict.fromkeys(world.clients, server), server, server={"past": past})


CASES = [
    Case("fedgkd", reference, {"gamma": 0.8, "models": 2}, {"rounds": 4}),
    Case("fedgkd", reference, {"gamma": 2.0, "models": 5, "temperature": 2.0}, {"weighting": "uniform"}, tag="hot"),
    Case("fedgkd", reference, {"gamma": 1.0, "models": 1}, {"epochs": 2}, models=("mlp",), tag="one"),
]
