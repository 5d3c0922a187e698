"""Floco. Grinwald, Wiesner, Nakajima, NeurIPS 2024 (arXiv 2403.03333).

The head's weight is a point of a simplex spanned by M endpoints, all of them shared: a solution region instead of one
solution. Every batch draws a point, and body and endpoints are trained under it. After `tau` rounds the server places
the clients in the simplex by their last updates of the endpoints (principal components, projected so that the clients
spread most evenly). Afterwards a client draws from a small ball around its own place, and is scored at it.
All clients take part in round `tau` (the authors add a training of all clients that is not averaged). A client that did
not answer in it, or joins later, has the centre. The head's bias is shared, as in the authors' code.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field
from sklearn.decomposition import PCA
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Client, Download, Method, Model, Moment, Settings, Start, Upload
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts.clustering import FloatMatrix

ENDPOINTS, PLACE = "x:endpoints", "x:place"
NEAREST = 1e-4  # closer clients count as this far apart


class FlocoSettings(Settings):
    endpoints: int = Field(10, ge=2, le=1000, description="M: corners of the simplex")
    tau: int = Field(10, ge=1, description="round after which clients have places of their own")
    rho: float = Field(0.1, ge=0, description="radius of the ball around a client's place")


class Floco(Method):
    Settings = FlocoSettings
    hp: FlocoSettings
    card = Card(
        "Floco",
        "Grinwald et al., NeurIPS 2024, arXiv 2403.03333",
        2024,
        "S,M",
        personal="a place in a simplex of heads",
        compute="as FedAvg, with the sum of M heads per batch; everybody trains in one round",
    )
    needs = ("head",)

    def private(self, name: str) -> bool:
        """The weight of the head is computed from the endpoints and never travels."""
        return name == self.ctx.net.head_names[0]

    def _first(self) -> Tensor:
        """Return the initial endpoints [M, classes, d], drawn by Glorot's rule."""
        classes, d = self.ctx.w0[self.ctx.net.head_names[0]].shape
        drawn = torch.randn(self.hp.endpoints, classes, d, generator=self.ctx.rng("endpoints"))
        return drawn * math.sqrt(2 / (classes + d))

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model with all endpoints travels both ways; downloads add the client's place once it has one."""
        place = Schema({PLACE: Entry((self.hp.endpoints,), kind="control", part="places", optional=now is None)})
        model = self.model_schema | Schema(like({ENDPOINTS: self._first()}, part="endpoints"))
        if link == "up" or (now is not None and now.client not in now.server["places"]):
            return model
        return model | place

    def setup(self) -> State:
        return {"w": {**super().setup()["w"], ENDPOINTS: self._first()}, "places": {}}

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[int]:
        return list(self.ctx.clients) if round == self.hp.tau else super().sample(server, round, rng)

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        places = server["places"]
        return Download(server["w"], {i: {PLACE: places[i]} for i in ids if i in places})

    def init_client(self, data: ClientData) -> State:
        return {k: T.drop(v, self.private) for k, v in super().init_client(data).items()}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params = {**T.drop(download, PLACE.__eq__), **state.get("own", {})}
        centre = torch.full((self.hp.endpoints,), 1 / self.hp.endpoints, device=self.ctx.device)
        return Start(params, {"place": download.get(PLACE, centre), "placed": PLACE in download})

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        M = self.hp.endpoints
        if extras["placed"]:
            way = torch.rand(M) * 2 - 1
            point = extras["place"] + (torch.rand(()) * self.hp.rho * way / way.abs().sum()).to(self.ctx.device)
        else:
            point = torch.empty(M).exponential_()
            point = (point / point.sum()).to(self.ctx.device)
        return self.ctx.loss_of(self.ctx.forward(self.at(params, point), batch.x), batch)

    def at(self, params: Tree, point: Tensor) -> Tree:
        """Return the model with the head at a point [M]."""
        weight = torch.einsum("m,mcd->cd", point, params[ENDPOINTS])
        return {**T.drop(params, ENDPOINTS.__eq__), self.ctx.net.head_names[0]: weight}

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        new = super().aggregate(server, uploads, round)
        if round != self.hp.tau:
            return new
        updates = np.stack([(u.tree[ENDPOINTS] - server["w"][ENDPOINTS]).flatten().numpy() for u in uploads])
        places = torch.from_numpy(placed(updates, self.hp.endpoints)).float()
        return {**new, "places": {u.sender: p for u, p in zip(uploads, places, strict=True)}}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        start = self.begin(state, download, data, 0)
        return Model(self.at(start.params, start.extras["place"]))

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "trained" and client.trained is not None:
            return Model(self.at(client.trained.params, client.trained.extras["place"]))
        return super().model(view, client)

    def global_model(self, server: State) -> Tree | None:
        whole = self.at(server["w"], torch.full((self.hp.endpoints,), 1 / self.hp.endpoints))
        return {k: whole[k] for k in self.ctx.w0} if whole.keys() == self.ctx.w0.keys() else None


def placed(updates: FloatMatrix, corners: int) -> FloatMatrix:
    """Return the clients' places [clients, corners] in the simplex, from updates [clients, P].

    The principal components are projected onto simplices of different sizes; the projection with the least Riesz energy
    is taken, because it spreads the clients most evenly.
    """
    n = len(updates)
    points = np.zeros((n, corners))
    m = min(corners, n, updates.shape[1])
    if n > 1:
        points[:, :m] = PCA(m, svd_solver="full").fit_transform(updates.astype(np.float64))
    best, lowest = np.full((n, corners), 1 / corners), np.inf
    for size in np.linspace(1e-4, 1, 1000) if n > 1 else ():
        candidate = on_simplex(points, float(size)) / size
        if (energy := riesz(candidate)) < lowest:
            best, lowest = candidate, energy
    return best


def on_simplex(points: FloatMatrix, size: float) -> FloatMatrix:
    """Return the closest points [n, m] with non-negative entries that sum to `size`."""
    falling = -np.sort(-points, axis=1)
    excess = (falling.cumsum(1) - size) / np.arange(1, points.shape[1] + 1)
    last = (falling > excess).sum(1) - 1
    projected: FloatMatrix = np.maximum(points - excess[np.arange(len(points)), last][:, None], 0)
    return projected


def riesz(points: FloatMatrix) -> float:
    """Return the sum of 1 / distance^2 over all pairs."""
    gaps = np.linalg.norm(points[:, None] - points[None], axis=2)[np.triu_indices(len(points), 1)]
    return float((1 / np.maximum(gaps, NEAREST) ** 2).sum())
