"""MR-MTL. Liu, Hu, Wu, Smith, NeurIPS 2022 (arXiv 2206.07902).

Mean-regularised multi-task learning: every client keeps a model of its own, which is pulled towards the mean of all
models, loss + lambda/2 ||w - mean||^2. The server's mean moves by the mean of the clients' changes. With privacy of
single samples (`dp = example(...)`), lambda trades the noise of an own model against the differences between clients.
Departs from the authors' code:
- With privacy, batches are drawn by Poisson sampling, which the accountant assumes; theirs are shuffled.
- Clients that are not sampled keep their models; theirs all take part in every round.
"""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, Extras, State
from coterie.core.method import Card, Client, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.core.views import ModelView


class MRMTLSettings(Settings):
    lam: float = Field(1.0, ge=0, description="strength of the pull of a client's model towards the mean of all")


class MRMTL(Method):
    Settings = MRMTLSettings
    hp: MRMTLSettings
    card = Card("MR-MTL", "Liu et al., NeurIPS 2022, arXiv 2206.07902", 2022, "R", "a whole model", "P")
    weighting = "uniform"
    combines = "mean"

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The mean model (down), or the change of the client's own model (up)."""
        return Schema(like(T.drop(self.ctx.w0, self.stays), "update" if link == "up" else "model"))

    def init_client(self, data: ClientData) -> State:
        return {**super().init_client(data), "v": T.clone(T.drop(self.ctx.w0, self.stays))}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, state["v"], data, round)
        return start.adding(anchor=download)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, prior=self.pull if self.hp.lam else None)]

    def pull(self, params: Tree, extras: Extras) -> Tensor:
        """Return the pull towards the mean, which depends on no sample."""
        names = [k for k in extras["anchor"] if k in self.ctx.net.trainable]
        return self.hp.lam / 2 * T.sqdist(params, extras["anchor"], names)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return {**state, "v": upload.tree}, replace(upload, tree=T.sub(upload.tree, state["v"]))

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        mean = T.mean([u.tree for u in uploads], self.weights(uploads))
        return {**server, "w": T.add(server["w"], mean)}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return super().personal(state, state["v"], data)

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "newcomer":
            return super().personal(client.state, client.download, client.data)  # the mean of all
        return super().model(view, client)
