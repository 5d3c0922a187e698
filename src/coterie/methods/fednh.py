"""FedNH. Dai, Chen, Li, Heinecke, Sun, Xu, AAAI 2023 (arXiv 2212.02758).

The head is a set of class prototypes on the unit sphere that starts spread out evenly and is never trained by
gradient; clients train the body against it by scaled cosine logits. After training a client sends the mean direction
of its features per class, and the server moves each prototype a little that way. The personal model is the client's
after its last local training, with the prototypes it had received then; before any, it is the global one.
Prototypes travel as the head's weight; its bias is zero. With more classes than features they start well spread.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie import tree as T
from coterie.method import Batch, ClientData, Extras, Method, Payload, Phase, Settings, State, Upload, cross_entropy
from coterie.parts.prototypes import collect
from coterie.parts.sphere import move_rows, spread_rows
from coterie.tree import Tree

COUNTS, SCALE = "x:counts", "x:scale"


class FedNHSettings(Settings):
    rho: float = Field(0.9, ge=0, le=1, description="inertia of the prototypes; 1: they never move")
    scale: float = Field(30.0, gt=0, description="factor on the cosines (its first value if it is learned)")
    learn_scale: bool = Field(False, description="train the scale with the body and average it")
    server_lr: float = Field(1.0, gt=0, description="step of the server towards the mean body")
    clip: float = Field(10.0, gt=0, description="largest gradient norm")


class FedNH(Method):
    Settings = FedNHSettings
    hp: FedNHSettings
    title = "FedNH"
    paper = "Dai et al., AAAI 2023, arXiv 2212.02758"
    year = 2023
    family = "P"
    personal_part = "the model after its own training"
    needs = ("head",)
    weighting = "uniform"

    @property
    def _weight(self) -> str:
        return self.ctx.net.head_names[0]

    def _head(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def payload(self, labels: int, round: int = 1) -> Payload:
        body = T.nbytes(T.drop(self.ctx.w0, lambda k: self._head(k) or self.stays(k)))
        down = body + 4 * (self.ctx.classes * self.ctx.net.width + self.hp.learn_scale)
        return Payload(down + 4 * self.ctx.classes, down)

    def part(self, name: str) -> str:
        return "prototypes" if name in (self._weight, COUNTS) else "model"

    def setup(self) -> State:
        w = T.clone(T.drop(self.ctx.w0, lambda k: self._head(k) or self.stays(k)))
        w[self._weight] = spread_rows(self.ctx.classes, self.ctx.net.width, self.ctx.rng("prototypes"))
        return {"w": w | ({SCALE: torch.tensor(self.hp.scale)} if self.hp.learn_scale else {})}

    def _complete(self, tree: Tree) -> Tree:
        """With the bias that the network wants to see."""
        return {**{k: torch.zeros_like(v) for k, v in self.ctx.w0.items() if self._head(k)}, **tree}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        return self._complete({**download, **state.get("own", {})}), {}

    def _direction(self, params: Tree, x: Tensor) -> Tensor:
        return F.normalize(self.ctx.features(params, x), dim=1)

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        return params.get(SCALE, self.hp.scale) * (self._direction(params, x) @ params[self._weight].T)

    def predict_global(self, params: Tree, x: Tensor) -> Tensor:
        return self.predict(params, x, {})

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return cross_entropy(self.predict(params, batch.x, extras), batch)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, lambda k: not self._head(k), clip=self.hp.clip)]

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, params, extras, data, round)
        means, counts = collect(lambda x: self._direction(params, x), data.train.x, data.train.y, data.classes)
        tree = T.drop(upload.tree, self._head) | {self._weight: F.normalize(means.value, dim=1), COUNTS: counts.int()}
        return {**state, "model": params}, Upload(tree)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Bodies step to their uniform mean; prototypes move on the sphere, those of absent classes not at all."""
        old, special = server["w"], (self._weight, COUNTS)
        mean = T.mean([T.drop(u.tree, lambda k: k in special) for u in uploads], self.weights(uploads))
        w = {k: torch.lerp(old[k], v, self.hp.server_lr) for k, v in mean.items()}
        directions, counts = (torch.stack([u.tree[k] for u in uploads]) for k in special)
        return {"w": {**w, self._weight: move_rows(old[self._weight], directions, counts, self.hp.rho)}}

    def global_model(self, server: State) -> Tree | None:
        return super().global_model({"w": self._complete(server["w"])})

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return (state["model"] if "model" in state else self.begin(state, download, data, 0)[0]), {}
