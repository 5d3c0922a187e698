"""FedNova. Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020 (arXiv 2007.07481).

Clients take different numbers of local steps, so the mean of their models minimises a different objective than the sum
of their losses. FedNova divides each change by a_i, the total weight of the gradients in it (the number of steps for
plain SGD), averages, and multiplies by the mean of the a_i. The method equals FedAvg if all clients take equally many
steps. Momentum is part of a_i as in the paper: (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho). For Adam, a_i is the
number of steps. Batch-norm statistics are averaged. The authors' proximal term and server momentum are not included.
"""

from collections.abc import Sequence

import torch

from coterie.core import tree as T
from coterie.core.context import ClientData, State
from coterie.core.method import Card, Method, Moment, Trained, Upload
from coterie.core.schema import Entry, Link, Schema

STEPS = "x:steps"
MOST_STEPS = 10**6  # largest number of steps of one round that the server accepts


class FedNova(Method):
    card = Card(
        "FedNova",
        "Wang et al., NeurIPS 2020, arXiv 2007.07481",
        2020,
        "G",
        certainty="A",
        compute="as FedAvg",
    )
    needs = ("constant_lr",)  # changes are normalised by numbers of steps

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model travels both ways; uploads add the number of local steps."""
        steps = Entry((1,), torch.int32, "statistic", "steps", 0, MOST_STEPS)
        return self.model_schema | Schema({STEPS: steps} if link == "up" else {})

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        steps = torch.tensor([min(trained.steps, MOST_STEPS)], dtype=torch.int32)
        return state, Upload({**upload.tree, STEPS: steps})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        trees = [{k: u.tree[k] for k in server["w"]} for u in uploads]
        share = T.normalised(self.weights(uploads), len(uploads))
        a = [gradients_in(int(u.tree[STEPS]), self.ctx.momentum) for u in uploads]
        effective = sum(p * n for p, n in zip(share, a, strict=True))
        factors = [p * effective / n if n else 0.0 for p, n in zip(share, a, strict=True)]
        mean = T.mean(trees, share)
        w = {k: v for k, v in server["w"].items() if k in self.ctx.net.trainable}
        new = T.clone(w)
        for factor, tree in zip(factors, trees, strict=True):
            new = T.add(new, T.sub({k: tree[k] for k in w}, w), factor)
        return {**server, "w": {**mean, **new}}


def gradients_in(steps: int, rho: float) -> float:
    """a: the sum of the weights with which `steps` gradients enter a change of the model, at momentum rho."""
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
