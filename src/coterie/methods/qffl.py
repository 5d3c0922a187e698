"""q-FFL by q-FedAvg. Li, Sanjabi, Beirami, Smith, ICLR 2020 (arXiv 1905.10497).

It minimises the sum of F_i^(q+1) / (q+1): clients with a higher loss count more, so that accuracies spread less. A
client sends its model and F_i, its loss at the model received. The server computes g_i = (w - w_i) / lr and the new
model w - sum F_i^q g_i / sum (q F_i^(q-1) |g_i|^2 + F_i^q / lr). The method equals FedAvg if q = 0.
Clients are sampled and weighted uniformly, as in the authors' code; the paper samples them by their numbers of samples
(weighting = samples puts those into both sums instead).
Norms are over trained entries; batch-norm statistics are averaged.
"""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, Split, State
from coterie.core.method import Card, Method, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree

LOSS = "x:loss"
LOSS_OFFSET = 1e-10  # a loss of zero has no power below zero (the authors' constant)


class QFFLSettings(Settings):
    q: float = Field(1.0, ge=0, le=20, description="how much more a high loss counts; 0: FedAvg")


class QFFL(Method):
    Settings = QFFLSettings
    hp: QFFLSettings
    card = Card(
        "q-FFL",
        "Li et al., ICLR 2020, arXiv 1905.10497",
        2020,
        "G",
        certainty="A",
        compute="one further forward pass over the training part per round",
    )

    needs = ("constant_lr",)  # L = 1 / lr
    weighting = "uniform"

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model travels both ways; uploads add the client's loss at the model received."""
        return self.model_schema | Schema(
            {LOSS: Entry((1,), kind="statistic", part="loss", low=0)} if link == "up" else {}
        )

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params = super().begin(state, download, data, round).params
        return Start(params, {"loss": self.risk(params, data.train)})

    def risk(self, params: Tree, split: Split) -> Tensor:
        """Return the mean loss over a whole split [1]."""
        return self.ctx.losses(params, split, 512).sum()[None] / max(len(split), 1)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return state, Upload({**upload.tree, LOSS: trained.extras["loss"]})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        trees = [{k: u.tree[k] for k in server["w"]} for u in uploads]
        share = T.normalised(self.weights(uploads), len(uploads))
        mean = T.mean(trees, share)
        if self.hp.q == 0:
            return {**server, "w": mean}
        names = [k for k in server["w"] if k in self.ctx.net.trainable]
        lr, q = self.ctx.lr_at(round), self.hp.q
        factors, below = [], 0.0
        for p, u, tree in zip(share, uploads, trees, strict=True):
            F = float(u.tree[LOSS]) + LOSS_OFFSET
            square = float(T.sqdist(tree, server["w"], names)) / lr**2
            factors.append(p * F**q / lr)
            below += p * (q * F ** (q - 1) * square + F**q / lr)
        moved = {k: server["w"][k].clone() for k in names}
        for factor, tree in zip(factors, trees, strict=True):
            moved = T.add(moved, T.sub({k: tree[k] for k in names}, server["w"]), factor / below)
        return {**server, "w": {**mean, **moved}}
