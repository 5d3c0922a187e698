"""FedNH. Dai, Chen, Li, Heinecke, Sun, Xu, AAAI 2023 (arXiv 2212.02758).

The head is a set of class prototypes on the unit sphere that starts spread out evenly and is never trained by
gradient; clients train the body against it by scaled cosine logits. After training a client sends the mean direction
of its features per class, and the server moves each prototype a little that way. The personal model is the client's
after its last local training, with the prototypes it had received then; before any, it is the global one.
Prototypes travel as the head's weight; its bias is zero. They start well spread even with more classes than features.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, counts, like
from coterie.core.tree import Tree
from coterie.parts.prototypes import collect

CLASS_COUNTS, SCALE = "x:counts", "x:scale"
UNIT = 1 + 1e-5  # largest entry of a unit row, with room for rounding


class FedNHSettings(Settings):
    rho: float = Field(0.9, ge=0, le=1, description="inertia of the prototypes; 1: they never move")
    scale: float = Field(30.0, gt=0, description="factor on the cosines (its first value if it is learned)")
    learn_scale: bool = Field(False, description="train the scale with the body and average it")
    server_lr: float = Field(1.0, gt=0, description="step of the server towards the mean body")
    clip: float = Field(10.0, gt=0, description="largest gradient norm")


class FedNH(Method):
    Settings = FedNHSettings
    hp: FedNHSettings
    card = Card(
        "FedNH", "Dai et al., AAAI 2023, arXiv 2212.02758", 2023, "P", personal="the model after its own training"
    )
    needs = ("head", "classes")
    weighting = "uniform"

    @property
    def _weight(self) -> str:
        return self.ctx.net.head_names[0]

    def _head(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def _body(self) -> Tree:
        """The initial values of the entries that are trained and averaged."""
        return T.drop(self.ctx.w0, lambda k: self._head(k) or self.stays(k))

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The body and, instead of the head's weight, unit rows: prototypes down, mean directions up."""
        classes, part = self.ctx.classes, "prototypes"
        shape = (classes, self.ctx.net.width)
        rows = Entry(shape, kind="prototype", part=part, low=-UNIT, high=UNIT, shows_labels=link == "up")
        entries = {**like(self._body()), self._weight: rows}
        if self.hp.learn_scale:
            entries[SCALE] = Entry((), summable=True)
        return Schema({**entries, CLASS_COUNTS: counts(classes, part)} if link == "up" else entries)

    def setup(self) -> State:
        w = T.clone(self._body())
        w[self._weight] = spread_rows(self.ctx.classes, self.ctx.net.width, self.ctx.rng("prototypes"))
        return {"w": w | ({SCALE: torch.tensor(self.hp.scale)} if self.hp.learn_scale else {})}

    def _complete(self, tree: Tree) -> Tree:
        """Add the zero bias that the network expects."""
        return {**{k: torch.zeros_like(v) for k, v in self.ctx.w0.items() if self._head(k)}, **tree}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        return Start(self._complete({**download, **state.get("own", {})}))

    def _direction(self, params: Tree, x: Tensor) -> Tensor:
        return F.normalize(self.ctx.features(params, x), dim=1)

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        return params.get(SCALE, self.hp.scale) * (self._direction(params, x) @ params[self._weight].T)

    def predict_global(self, params: Tree, x: Tensor) -> Tensor:
        return self.predict(params, x, {})

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.loss_of(self.predict(params, batch.x, extras), batch)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, lambda k: not self._head(k), clip=self.hp.clip)]

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        means, samples = collect(lambda x: self._direction(trained.params, x), data.train.x, data.train.y, data.classes)
        tree = T.drop(upload.tree, self._head) | {
            self._weight: F.normalize(means.value, dim=1),
            CLASS_COUNTS: samples.int(),
        }
        return {**state, "model": trained.params}, Upload(tree)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Average the bodies uniformly and move the prototypes of present classes on the sphere."""
        old, special = server["w"], (self._weight, CLASS_COUNTS)
        mean = T.mean([T.drop(u.tree, lambda k: k in special) for u in uploads], self.weights(uploads))
        w = {k: torch.lerp(old[k], v, self.hp.server_lr) for k, v in mean.items()}
        directions, samples = (torch.stack([u.tree[k] for u in uploads]) for k in special)
        return {"w": {**w, self._weight: move_rows(old[self._weight], directions, samples, self.hp.rho)}}

    def global_model(self, server: State) -> Tree | None:
        return super().global_model({"w": self._complete(server["w"])})

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["model"] if "model" in state else self.begin(state, download, data, 0).params)


def spread_rows(rows: int, width: int, rng: torch.Generator, steps: int = 500, sharpness: float = 20.0) -> Tensor:
    """Return unit rows [rows, width]: orthonormal if they fit, else with their largest cosines reduced."""
    draw = torch.randn(rows, width, generator=rng, dtype=torch.float64)
    if rows <= width:
        basis: Tensor = torch.linalg.qr(draw.T).Q
        return basis.T.float().contiguous()
    eye = torch.eye(rows, dtype=torch.bool)
    P = F.normalize(draw, dim=1)
    for _ in range(steps):
        # gradient of the soft maximum of the cosines in a row, followed by a return to the sphere
        pull = (sharpness * (P @ P.T)).masked_fill(eye, -torch.inf).softmax(1)
        P = F.normalize(P - 0.1 * (pull + pull.T) @ P, dim=1)
    return P.float()


def move_rows(P: Tensor, directions: Tensor, counts: Tensor, rho: float) -> Tensor:
    """Return unit(rho P + (1 - rho) M), where M is the mean of directions [n, classes, d] by counts [n, classes].

    Rows of classes without samples are returned bit for bit, and so are all rows if rho = 1.
    """
    mean = torch.einsum("nk,nkd->kd", counts.to(directions), directions)
    moved = F.normalize(rho * P + (1 - rho) * F.normalize(mean, dim=1), dim=1)
    still = (mean.norm(dim=1, keepdim=True) == 0) | (rho == 1)
    return torch.where(still, P, moved)
