"""FedPav, federated partial averaging. Zhuang, Wen, Zhang, Gan, Yin, Zhou, Zhang, Yi, ACM MM 2020 (arXiv 2008.11560).

Written for person re-identification, where clients have different people: the classifier stays on the client and
everything else is averaged by numbers of samples, as in FedPer with one personal layer. With `cosine_weight` (the
paper's CDW) clients count by how much a round changed their outputs instead: the mean cosine distance between the
outputs before and after local training on a random batch of their own.
The paper's other addition, distillation of features on public data at the server, is left out.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field

from coterie.core import tree as T
from coterie.core.context import ClientData, State
from coterie.core.method import Card, Method, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree

MODEL_DISTANCE = "x:distance"


class FedPavSettings(Settings):
    cosine_weight: bool = Field(False, description="weight clients by the change of their outputs, not by samples")


class FedPav(Method):
    Settings = FedPavSettings
    hp: FedPavSettings
    card = Card(
        "FedPav", "Zhuang et al., ACM MM 2020, arXiv 2008.11560", 2020, "S", personal="the classifier", certainty="A"
    )
    needs = ("head",)

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Everything but the classifier travels both ways; with cosine_weight uploads add a distance."""
        distance = Schema({MODEL_DISTANCE: Entry((1,), kind="statistic", part="distance", low=0, high=2)})
        return self.model_schema | distance if link == "up" and self.hp.cosine_weight else self.model_schema

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        if not self.hp.cosine_weight:
            return start
        order = torch.randperm(len(data.train), generator=self.ctx.rng("cosine", round, data.client))
        x = data.train.x[order[: self.ctx.batch]]
        return start.adding(x=x, before=self.ctx.outputs(start.params, x))

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        if not self.hp.cosine_weight:
            return state, upload
        after = self.ctx.outputs(trained.params, trained.extras["x"])
        far = (1 - F.cosine_similarity(trained.extras["before"], after)).mean().clamp(0, 2)
        return state, Upload({**upload.tree, MODEL_DISTANCE: far[None]})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        trees = [{k: u.tree[k] for k in server["w"]} for u in uploads]
        weights: Sequence[float] | None = self.weights(uploads)
        if self.hp.cosine_weight:
            far = [float(u.tree[MODEL_DISTANCE]) for u in uploads]
            weights = far if sum(far) > 0 else weights  # no output changed: by samples
        return {**server, "w": T.mean(trees, weights)}
