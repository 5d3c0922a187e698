"""FedMD. Li, Wang, arXiv 1910.03581, 2019.

No weights travel: clients send their scores (logits) on a public set, the server averages them, and each client draws
its own model's scores to that consensus before it trains on its own data again. So the models of clients only need to
agree in their outputs.
The public set here has no labels, so the authors' training on it before the first round is left out; it holds few
items, so all of them are scored in every round (the authors draw a part). The loss is the mean absolute difference of
scores, as in the authors' code, in steps of plain SGD at the run's rate.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Download, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.parts.gradient import grad

PUBLIC_SCORES = "x:scores"


class FedMDSettings(Settings):
    digest_epochs: float = Field(1, ge=0, description="passes over the public set towards the consensus")


class FedMD(Method):
    Settings = FedMDSettings
    hp: FedMDSettings
    card = Card(
        "FedMD",
        "Li and Wang, arXiv 1910.03581, 2019",
        2019,
        "P",
        personal="the whole model",
        compute="a training pass and a forward pass over the public set",
    )
    needs = ("public",)
    weighting = "uniform"
    agree = "output"

    def private(self, name: str) -> bool:
        return True

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Scores of all public items travel both ways; downloads hold NaN before the first answer."""
        shape = (self.ctx.public, self.ctx.task.outputs)
        return Schema(
            {PUBLIC_SCORES: Entry(shape, kind="prediction", part="scores", nan=link == "down", summable=True)}
        )

    def setup(self) -> State:
        return {"scores": torch.full((self.ctx.public, self.ctx.task.outputs), torch.nan)}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        return Download({PUBLIC_SCORES: server["scores"]})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        assert data.public is not None
        scores = download[PUBLIC_SCORES]
        rate = 0.0 if bool(scores.isnan().any()) else self.ctx.lr_at(round)
        return Start(state["own"], {"public": data.public, "scores": scores.nan_to_num(), "rate": rate})

    def phases(self, round: int) -> list[Phase]:
        steps = math.ceil(self.hp.digest_epochs * math.ceil(self.ctx.public / self.ctx.batch))
        return [Phase(update=self.digest, steps=steps), Phase(self.loss)]

    def digest(self, params: Tree, batch: Batch, extras: Extras, rng: torch.Generator) -> Tree:
        """Step towards the consensus on some public items; the client's own batch is not used."""
        drawn = torch.randperm(len(extras["public"]), generator=rng)[: self.ctx.batch]
        if not extras["rate"]:
            return params
        drawn = drawn.to(self.ctx.device)
        x, target = extras["public"][drawn], extras["scores"][drawn]
        names = [k for k in params if k in self.ctx.net.trainable]

        def distance(p: Tree) -> Tensor:
            return F.l1_loss(self.ctx.forward(p, x), target)

        return {**params, **T.add({k: params[k] for k in names}, grad(distance, params, names), -extras["rate"])}

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        scores = self.ctx.outputs(trained.params, trained.extras["public"], 512)
        return {**state, "own": trained.params}, Upload({PUBLIC_SCORES: scores})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        return {"scores": T.mean([u.tree for u in uploads], self.weights(uploads))[PUBLIC_SCORES]}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["own"])
