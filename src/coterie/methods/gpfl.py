"""GPFL. Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, ICCV 2023 (arXiv 2308.10279).

A shared valve turns features into a personal and a global version, conditioned on the client's mean class embedding
and on the mean of all. The personal version feeds the client's own head; the global one is matched with the shared
class embeddings, by cosine and by distance to those received. Body, embeddings and valve are averaged.
Conditions are made from the embeddings just received (the authors' code uses those of a round ago, zeros at first).
Weight decay acts on embeddings and valve only, as in the paper: the run's own weight decay is not used.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Method, Model, Moment, Phase, Settings, Start
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.parts import small_layers

CLASS_VECTORS = "x:classes"


class GPFLSettings(Settings):
    lam: float = Field(0.01, ge=0, description="strength of the pull of global features towards received embeddings")
    mu: float = Field(0.1, ge=0, description="weight decay of embeddings and valve")


class GPFL(Method):
    Settings = GPFLSettings
    hp: GPFLSettings
    card = Card("GPFL", "Zhang et al., ICCV 2023, arXiv 2308.10279", 2023, "S,P", personal="the head")
    needs = ("head", "classes")

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The body with class embeddings and valve travels both ways."""
        return self.model_schema | Schema(like(self._extras(), part="embeddings and valve"))

    def _extras(self) -> Tree:
        d, rng = self.ctx.net.width, self.ctx.rng("valve")
        tree = {CLASS_VECTORS: torch.randn(self.ctx.classes, d, generator=rng)}
        for branch in ("x:gamma", "x:beta"):
            tree |= {**small_layers.linear(branch, d, d, rng), **small_layers.layer_norm(branch + ".norm", d)}
        return tree

    def setup(self) -> State:
        return {"w": {**super().setup()["w"], **self._extras()}}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        C, counts = download[CLASS_VECTORS], data.label_counts.to(download[CLASS_VECTORS])
        own = counts @ C / counts.sum().clamp(min=1)
        return Start({**download, **state["own"]}, {"classes": C, "common": C.mean(0), "own": own})

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, weight_decay=lambda k: self.hp.mu if T.is_tagged("x", k) else 0.0)]

    def valve(self, params: Tree, z: Tensor, condition: Tensor) -> Tensor:
        """relu((gamma(c) + 1) z + beta(c)) of features z [batch, d] and conditions c [..., d]: [..., batch, d]."""
        gamma, beta = (self._branch(params, branch, condition).unsqueeze(-2) for branch in ("x:gamma", "x:beta"))
        return ((gamma + 1) * z + beta).relu()

    def _branch(self, params: Tree, branch: str, condition: Tensor) -> Tensor:
        hidden = small_layers.run_linear(params, branch, condition).relu()
        return small_layers.run_layer_norm(params, branch + ".norm", hidden)

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        both = torch.stack([extras["own"], extras["common"]])
        own, common = self.valve(params, self.ctx.features(params, batch.x), both)
        cosine = F.normalize(common, dim=1) @ F.normalize(params[CLASS_VECTORS], dim=1).T
        total = self.ctx.loss_of(self.ctx.logits(params, own), batch) + self.ctx.loss_of(cosine, batch)
        if self.hp.lam == 0:
            return total
        gap = common - extras["classes"][batch.y]
        gap = gap if batch.weight is None else gap * batch.weight[:, None]
        norm: Tensor = torch.linalg.vector_norm(gap)  # norm of the whole batch, not squared
        return total + self.hp.lam * norm

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return self.begin(state, download, data, 0).model

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        return self.ctx.logits(params, self.valve(params, self.ctx.features(params, x), extras["own"]))
