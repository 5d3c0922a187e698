"""kNN-Per. Marfoq, Neglia, Kameni, Vidal, ICML 2022 (arXiv 2111.09360).

The federation trains one model by FedAvg. A client stores the features of its training samples under that model, and
predicts by a mixture: `share` times the labels of the k nearest stored samples, weighed by exp(-d^2 / (dim * scale)),
plus 1 - share times the model's own probabilities. Nothing more is trained and nothing more is sent.
If no share is given, a client takes the one of 0, 0.1, ..., 1 that is best on its validation part, as in the paper
(the first of equal ones; 0.5 without such a part). The view `trained` is the model alone.
"""

import torch
from pydantic import Field
from torch import Tensor

from coterie.core.context import ClientData, Extras, State
from coterie.core.method import Card, Method, Model, Settings
from coterie.core.tree import Tree
from coterie.parts.neighbours import LEAST_PROBABILITY, votes

SHARES = [i / 10 for i in range(11)]


class KNNPerSettings(Settings):
    k: int = Field(10, ge=1, description="neighbours that are asked")
    scale: float = Field(1.0, gt=0, description="width of the kernel, in units of the number of features")
    share: float | None = Field(
        None, ge=0, le=1, description="weight of the neighbours; empty: chosen on validation data"
    )


class KNNPer(Method):
    Settings = KNNPerSettings
    hp: KNNPerSettings
    card = Card(
        "kNN-Per",
        "Marfoq et al., ICML 2022, arXiv 2111.09360",
        2022,
        "F",
        personal="a store of features and labels",
        compute="rounds as FedAvg; before use, a forward pass over the training part; k neighbours per prediction",
    )
    needs = ("head", "classes")

    @torch.no_grad()
    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        params, _ = super().personal(state, download, data)
        if not len(data.train):
            return Model(params)
        keys = self.ctx.outputs(params, data.train.x, 512, self.ctx.features)
        store = {"keys": keys, "labels": data.train.y, "share": 0.5 if self.hp.share is None else self.hp.share}
        if self.hp.share is None and len(data.val):
            hits = [float((self.mixed(params, data.val.x, store, s).argmax(1) == data.val.y).sum()) for s in SHARES]
            store["share"] = SHARES[max(range(len(SHARES)), key=hits.__getitem__)]
        return Model(params, store)

    def mixed(self, params: Tree, x: Tensor, store: Extras, share: float) -> Tensor:
        """Return the mixed probabilities [batch, classes]."""
        logits, z = self.ctx.net.both(params, x)
        near = votes(z, store["keys"], store["labels"], self.hp.k, self.hp.scale, self.ctx.classes)
        return share * near + (1 - share) * logits.softmax(1)

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        if "keys" not in extras:
            return self.ctx.forward(params, x)
        return self.mixed(params, x, extras, extras["share"]).clamp(min=LEAST_PROBABILITY).log()
