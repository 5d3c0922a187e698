"""DivFL. Balakrishnan, Li, Zhou, Himayat, Smith, Bilmes, ICLR 2022.

FedAvg that selects clients by what they represent: those whose gradients, as a set, are closest to the gradients of all
clients (facility location, maximised greedily: each step adds the client that most reduces the sum over all clients of
the distance to the nearest selected one). All clients send the gradient of their loss over their training part in an
opening round; later a participant sends the one at the model that it received, in addition to its model.
Between two updates the server uses a client's last gradient. A client that missed the opening round cannot be
represented and takes part first. Batch norm uses running statistics in these gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import PER_PASS, Batch, ClientData, ClientId, State
from coterie.core.method import Card, Method, Moment, Start, Trained, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.parts.gradient import grad

SLOPE = "gradient"


class DivFL(Method):
    card = Card(
        "DivFL",
        "Balakrishnan et al., ICLR 2022",
        2022,
        "G",
        certainty="A",
        compute="one further gradient over the training part per round",
    )

    def _names(self) -> list[str]:
        return [k for k in self.ctx.w0 if k in self.ctx.net.trainable]

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model travels both ways, except up in the opening round; uploads add a gradient."""
        if link == "down":
            return self.model_schema
        slope = Schema(like(T.tag(SLOPE, {k: self.ctx.w0[k] for k in self._names()}), "update", "gradient"))
        if now is None:
            return self.model_schema.optional() | slope
        return slope if now.round == 0 else self.model_schema | slope

    def opening(self) -> bool:
        return True

    def setup(self) -> State:
        return {**super().setup(), "gradients": {}}

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        known = server["gradients"]
        count = self.ctx.participants()
        if round == 0 or count == len(self.ctx.clients):
            return list(self.ctx.clients)
        new = [i for i in self.ctx.clients if i not in known]
        ids = [i for i in self.ctx.clients if i in known]
        chosen = [ids[k] for k in representatives(torch.stack([known[i] for i in ids]), count)] if ids else []
        return sorted([*new, *chosen][:count])

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        return Start(start.params, {"slope": self.slope(start.params, data)}, train=round > 0)

    def slope(self, params: Tree, data: ClientData) -> Tree:
        """Return the gradient of the mean loss over the training part."""
        names = self._names()
        total = {k: torch.zeros_like(params[k]) for k in names}
        for x, y in zip(torch.split(data.train.x, PER_PASS), torch.split(data.train.y, PER_PASS), strict=True):
            g = grad(lambda p, x=x, y=y: self.ctx.loss(p, Batch(x, y)), params, names)  # type: ignore[misc]
            total = T.add(total, g, len(y) / len(data.train))
        return total

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        slope = T.tag(SLOPE, trained.extras["slope"])
        return state, Upload(slope if round == 0 else {**upload.tree, **slope})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        fresh = {u.sender: T.flatten(T.tagged(SLOPE, u.tree), self._names()) for u in uploads}
        models = [Upload(T.untagged(u.tree), u.note, u.sender, u.samples) for u in uploads]
        new = server if round == 0 else super().aggregate(server, models, round)
        return {**new, "gradients": {**server["gradients"], **fresh}}


def representatives(rows: Tensor, count: int) -> list[int]:
    """Return the positions of the rows [n, P] that greedily minimise the sum of distances to the nearest of them."""
    far = torch.cdist(rows.double(), rows.double())
    nearest = torch.full((len(rows),), torch.inf, dtype=torch.float64)
    chosen: list[int] = []
    for _ in range(min(count, len(rows))):
        costs = torch.minimum(nearest[:, None], far).sum(0)
        costs[chosen] = torch.inf
        chosen.append(int(costs.argmin()))
        nearest = torch.minimum(nearest, far[:, chosen[-1]])
    return chosen
