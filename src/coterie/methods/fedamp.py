"""FedAMP. Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, AAAI 2021 (arXiv 2007.03797).

The server keeps the last model of every client and sends each a mixture u_i in which similar models weigh more; the
client trains its own model with a pull lambda/(2 alpha) ||w - u_i||^2. Clients that never answered have w_0.
The default is HeurFedAMP (cosine weights), which the paper prefers for deep networks; training starts from w_i.
Distances and cosines are those of trained parameters, as in PFLlib: batch-norm statistics are mixed but not compared.
PFLlib's penalty has no gradient, so its FedAMP is local training; here it pulls, as the paper says.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, ClientId, Extras, State
from coterie.core.method import (
    Card,
    Client,
    Download,
    Method,
    Model,
    Phase,
    Settings,
    Start,
    TaskLoss,
    Trained,
    Upload,
    unless_overridden,
)
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.errors import CoterieError
from coterie.parts import model_bank as bank


class FedAMPSettings(Settings):
    variant: Literal["heuristic", "attention"] = Field("heuristic", description="HeurFedAMP or the paper's A'")
    alpha: float = Field(1.0, gt=0, description="step of the attention; the pull is lam / alpha")
    sigma: float = Field(1.0, gt=0, description="sharpness of cosine weights, or width of the attention")
    lam: float = Field(1.0, ge=0, description="strength of the pull towards the mixture")
    self_weight: float = Field(0.1, ge=0, le=1, description="fraction of the own model (heuristic)")


class FedAMP(Method):
    Settings = FedAMPSettings
    hp: FedAMPSettings
    card = Card(
        "FedAMP",
        "Huang et al., AAAI 2021, arXiv 2007.03797",
        2021,
        "M,R",
        personal="the whole model, mixed on the server",
        certainty="B",
    )

    def setup(self) -> State:
        return {"bank": bank.fill(T.drop(self.ctx.w0, self.stays), self.ctx.clients)}

    def mixing(self, V: Tensor, rows: Tensor) -> Tensor:
        """Return the weights xi [rows, clients] for the parameters V [clients, P] of all models."""
        own = (torch.arange(len(rows)), rows)
        if len(V) == 1:
            return torch.ones(len(rows), 1)
        if self.hp.variant == "heuristic":
            U = torch.nn.functional.normalize(V, dim=1)
            c = self.hp.sigma * (U[rows] @ U.T)
            c[own] = -torch.inf
            X = (1 - self.hp.self_weight) * c.softmax(1)
            X[own] = self.hp.self_weight
            return X
        squares = V.square().sum(1)
        d2 = (squares[rows, None] + squares[None] - 2 * V[rows] @ V.T).clamp(min=0)
        X = self.hp.alpha * torch.exp(-d2 / self.hp.sigma) / self.hp.sigma
        X[own] = 0
        X[own] = 1 - X.sum(1)
        if not bool((X[own] >= 0).all()):
            raise CoterieError("FedAMP: alpha / sigma is too large, a client's own weight became negative")
        return X

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        known, V = bank.known(server["bank"], ids), server["bank"]["flat"]
        like = T.drop(self.ctx.w0, self.stays)
        compared = V[:, bank.columns(like, self.ctx.net.trainable)]
        mixed = self.mixing(compared, bank.rows(server["bank"], known)) @ V
        mean = T.unflatten(V.mean(0), like) if len(known) < len(ids) else {}  # for clients without a model here
        return Download(each={**dict.fromkeys(ids, mean), **dict(zip(known, bank.trees(mixed, like), strict=True))})

    def init_client(self, data: ClientData) -> State:
        return {"w": T.clone(self.ctx.w0)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        return Start(state["w"], {"u": download})

    def phases(self, round: int) -> list[Phase]:
        return [Phase(unless_overridden(self, FedAMP, "loss", self._pulled))] if round > 0 else []

    @property
    def _pulled(self) -> TaskLoss:
        return TaskLoss(self.ctx, pull=self.hp.lam / self.hp.alpha, reference="u")

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self._pulled(params, batch, extras)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        return {"w": trained.params}, Upload(T.drop(trained.params, self.stays))

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        return {"bank": bank.put(server["bank"], {u.sender: u.tree for u in uploads})}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["w"])

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "newcomer":
            return Model({**client.state["w"], **client.download})  # the mixture that pulls its training
        return super().model(view, client)

    def global_model(self, server: State) -> None:
        return None
