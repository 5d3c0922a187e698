"""FedAS. Yang, Huang, Ye, CVPR 2024.

Heads stay on the clients. Before training a client aligns the received body with its own last model: it draws the
features of its samples to that model's class means, so that a body averaged over others fits its head again. The
server averages bodies by the trace of the Fisher information of the clients' models, so that clients that trained
little (partial participation) count little.
The client's own last model is scored, as in the authors' code; a client that has never trained has the received body
and the initial head. Alignment is by plain SGD at `align_lr` with the run's batch size (the authors use 16).
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.parts.gradient import grad
from coterie.parts.prototypes import collect, one_hot

FISHER = "x:fisher"


class FedASSettings(Settings):
    align_epochs: float = Field(1, ge=0, description="epochs of alignment before local training")
    align_lr: float = Field(0.01, ge=0, description="rate of the alignment")


class FedAS(Method):
    Settings = FedASSettings
    hp: FedASSettings
    card = Card(
        "FedAS",
        "Yang et al., CVPR 2024",
        2024,
        "S,P",
        personal="the head, and the last local model",
        compute="an epoch of alignment before local training and a pass of gradients after it",
    )
    needs = ("head", "classes")

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The body travels both ways; uploads add the trace of the Fisher information."""
        return self.model_schema | Schema(
            {FISHER: Entry((1,), kind="statistic", part="fisher information", low=0)} if link == "up" else {}
        )

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params = super().begin(state, download, data, round).params
        last = state.get("last", self.ctx.w0)
        own, _ = collect(lambda x: self.ctx.features(last, x), data.train.x, data.train.y, data.classes)
        return Start(params, {"means": own.value})

    def phases(self, round: int) -> list[Phase]:
        return [Phase(update=self.align, epochs=self.hp.align_epochs, stream=1), Phase(self.loss)]

    def align(self, params: Tree, batch: Batch, extras: Extras, rng: torch.Generator) -> Tree:
        """Step the body on the sum over the batch's classes of the mean squared distance to the class mean."""
        names = [k for k in params if k in self.ctx.net.trainable and not self.private(k)]

        def distance(p: Tree) -> Tensor:
            gap = (self.ctx.features(p, batch.x) - extras["means"][batch.y]).square().mean(1)
            hot = one_hot(batch.y, len(extras["means"]))
            total: Tensor = ((gap @ hot) / hot.sum(0).clamp(min=1)).sum()
            return total

        gradient = grad(distance, params, names)
        return {**params, **T.add({k: params[k] for k in names}, gradient, -self.hp.align_lr)}

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        kept, upload = super().end(state, trained, data, round)
        return {**kept, "last": trained.params}, Upload({**upload.tree, FISHER: self.fisher(trained.params, data)})

    def fisher(self, params: Tree, data: ClientData) -> Tensor:
        """Return the sum of the squared gradient norms of all batches [1]."""
        total = torch.zeros(1, device=self.ctx.device)
        names = [k for k in params if k in self.ctx.net.trainable]
        pairs = zip(*(torch.split(t, self.ctx.batch) for t in data.train), strict=True)
        for x, y in pairs:
            batch = Batch(x, y)
            gradient = grad(lambda p, batch=batch: self.ctx.ce(p, batch), params, names)  # type: ignore[misc]
            total += T.dot(gradient, gradient)
        return total

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        weights = [float(u.tree[FISHER]) for u in uploads]
        bodies = [{k: u.tree[k] for k in server["w"]} for u in uploads]
        return {**server, "w": T.mean(bodies, weights if sum(weights) > 0 else self.weights(uploads))}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["last"]) if "last" in state else super().personal(state, download, data)
