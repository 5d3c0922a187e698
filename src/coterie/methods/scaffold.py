"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020 (arXiv 1910.06378).

Each client keeps a control variate c_i, an estimate of its gradient; the server keeps their mean c. Local steps follow
g - c_i + c, so that clients do not drift apart. Afterwards c_i becomes c_i - c + (x - y) / (K lr), where x is the
model received, y the one after K steps (the paper's option II), and c moves by the mean change over all clients.
The correction is a linear term of the loss, so any optimiser sees it; option II is a mean gradient for plain SGD only.
Batch-norm statistics have no control variate and are averaged.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Download, Method, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree

CONTROL = "c:"


class ScaffoldSettings(Settings):
    server_lr: float = Field(1.0, gt=0, description="step of the server along the mean change")


class Scaffold(Method):
    Settings = ScaffoldSettings
    hp: ScaffoldSettings
    card = Card(
        "SCAFFOLD",
        "Karimireddy et al., ICML 2020, arXiv 1910.06378",
        2020,
        "G,R",
        personal="a control variate, no model",
        certainty="B",
        compute="as FedAvg; one inner product with the parameters per step",
    )
    needs = ("constant_lr",)  # c_i is the change of the model divided by steps times lr
    weighting = "uniform"

    def _zero(self) -> Tree:
        return {k: torch.zeros_like(v) for k, v in self.ctx.w0.items() if k in self.ctx.net.trainable}

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model and, over its trained entries, c (down) or the change of c_i (up)."""
        return self.model_schema | Schema(like(T.tag(CONTROL, self._zero()), "update", "control variate"))

    def setup(self) -> State:
        return {**super().setup(), "c": self._zero()}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        return Download(shared={**server["w"], **T.tag(CONTROL, server["c"])})

    def init_client(self, data: ClientData) -> State:
        return {**super().init_client(data), "c": self._zero()}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params = super().begin(state, T.drop(download, T.has_tag(CONTROL)), data, round).params
        c = T.tagged(CONTROL, download)
        return Start(params, {"start": params, "c": c, "gap": T.sub(c, state["c"])})

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.loss(params, batch) + T.dot(extras["gap"], params)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        kept, upload = super().end(state, trained, data, round)
        steps = trained.steps
        change = self._zero()
        if steps:
            rate = 1 / (steps * self.ctx.lr_at(round))
            change = {
                k: rate * (trained.extras["start"][k] - trained.params[k]) - c for k, c in trained.extras["c"].items()
            }
        return {**kept, "c": T.add(state["c"], change)}, Upload({**upload.tree, **T.tag(CONTROL, change)})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        mean = T.mean([u.tree for u in uploads], self.weights(uploads))
        change = T.tagged(CONTROL, T.mean([T.keep(u.tree, T.has_tag(CONTROL)) for u in uploads]))
        w = {k: mean[k] for k in server["w"]}
        if self.hp.server_lr != 1:
            w = T.add(server["w"], T.sub(w, server["w"]), self.hp.server_lr)
        return {"w": w, "c": T.add(server["c"], change, len(uploads) / len(self.ctx.clients))}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(self.begin(state, download, data, 0).params)
