"""FedPAC. Xu, Tong, Huang, ICLR 2023 (arXiv 2306.11867).

The body is averaged and its features are drawn to global class means; each client's head is a combination of all
participants' heads, with the weights that minimise an estimate of its error: the variance of each participant's
features over its number of samples, plus the squared distance between their class-weighted mean features. A client
first fits its head with the body frozen, then the body with the head frozen.
These points follow the authors' code: statistics are of the received body, class means of the trained one; means of a
round are those of its participants; a class that none of them has is drawn to the client's own mean; weights below
0.001 are dropped. Two points depart from it: the rate of the head is the run's (0.1 in their code), and the solver is
exact, by least squares.
"""

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field
from scipy.optimize import nnls
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Client, Download, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, class_ids, counts
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts.prototypes import collect

PROTOTYPES = "x:prototypes"
SMALL = 1e-3  # smaller weights are set to zero
_CHUNK = 512  # samples of one pass and of one partial sum


class FedPACSettings(Settings):
    lam: float = Field(1.0, ge=0, description="strength of the pull of features towards class means")
    head_epochs: float = Field(1, ge=0, description="epochs on the head, body frozen")


class FedPAC(Method):
    Settings = FedPACSettings
    hp: FedPACSettings
    card = Card(
        "FedPAC",
        "Xu et al., ICLR 2023, arXiv 2306.11867",
        2023,
        "S,P,M",
        personal="the head, combined on the server",
        compute="an epoch on the head and two forward passes over the training part; the server solves a small"
        " quadratic problem per participant",
    )
    needs = ("head", "classes")

    def _head(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Uploads: model, class means before and after training, counts, a variance. Downloads: body, head, means."""
        classes, width, part = self.ctx.classes, self.ctx.net.width, "prototypes"
        if link == "down":
            means = Schema({PROTOTYPES: Entry((classes, width), kind="prototype", part=part, nan=True)})
            body = Schema({k: e for k, e in self.model_schema.entries.items() if not self._head(k)})
            head = Schema({k: e for k, e in self.model_schema.entries.items() if self._head(k)})
            if now is None:
                return body | means | Schema(head.optional().entries)
            return body | means | (head if self._heads(now.server, [now.client]) else Schema({}))
        entries = {
            "x:before": Entry(("labels", width), kind="prototype", part=part),
            "x:means": Entry(("labels", width), kind="prototype", part=part),
            "x:labels": class_ids("labels", classes, part),
            "x:counts": counts("labels", part),
            "x:variance": Entry((1,), kind="statistic", part=part, low=0),
        }
        return self.model_schema | Schema(entries, {"labels": (0, classes)})

    def setup(self) -> State:
        w = T.drop(super().setup()["w"], self._head)
        return {"w": w, "heads": {}, "means": torch.full((self.ctx.classes, self.ctx.net.width), torch.nan)}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        return Download({**server["w"], PROTOTYPES: server["means"]}, self._heads(server, ids))

    def _heads(self, server: State, ids: Sequence[int]) -> dict[int, Tree]:
        """Return the heads of these clients; newcomers have the mean of all heads."""
        heads = server["heads"]
        new = [i for i in ids if i not in self.ctx.clients and i not in heads] if heads else []
        mean = T.mean([heads[i] for i in sorted(heads)]) if new else {}
        return {i: heads[i] for i in ids if i in heads} | dict.fromkeys(new, mean)

    def _model(self, state: State, download: Tree) -> Tree:
        """Return the body with the client's combined head (the initial head if it has none yet)."""
        first = T.keep(self.ctx.w0, self._head)
        return {**first, **T.drop(download, PROTOTYPES.__eq__), **state.get("own", {})}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params, means = self._model(state, download), download[PROTOTYPES]
        (own, mask), n = collect(lambda x: self.ctx.features(params, x), data.train.x, data.train.y, data.classes)
        known = ~means.isnan().any(1, keepdim=True)
        return Start(
            params,
            {
                "before": own[mask],
                "variance": self._variance(params, data, own, n),
                "target": torch.where(known, means.nan_to_num(), own),
                "lam": self.hp.lam * float(known.any()),
            },
        )

    def _variance(self, params: Tree, data: ClientData, own: Tensor, n: Tensor) -> Tensor:
        """Return (mean |z|^2 - sum over classes of |p_k mu_k|^2) / n of the client's features [1]."""
        z = self.ctx.outputs(params, data.train.x, _CHUNK, self.ctx.features).double()
        total = sum(float(part.square().sum()) for part in torch.split(z, _CHUNK))
        size = max(len(data.train), 1)
        shares = (n.double() / size)[:, None] * own.double()
        return torch.tensor([max(0.0, total / size - float(shares.square().sum())) / size], dtype=torch.float32)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, self._head, self.hp.head_epochs), Phase(self.pulled, lambda k: not self._head(k))]

    def pulled(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        logits, z = self.ctx.net.both(params, batch.x)
        gap = (z - extras["target"][batch.y]).square().mean(1)
        w = torch.ones_like(gap) if batch.weight is None else batch.weight
        lam: Tensor = extras["lam"]
        pull: Tensor = (gap * w).sum() / w.sum().clamp(min=1)
        return self.ctx.loss_of(logits, batch) + pull * lam

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        (own, mask), n = collect(
            lambda x: self.ctx.features(trained.params, x), data.train.x, data.train.y, data.classes
        )
        sent = {"x:before": trained.extras["before"], "x:means": own[mask], "x:variance": trained.extras["variance"]}
        labels = {"x:labels": mask.nonzero()[:, 0].int(), "x:counts": n[mask].int()}
        return state, Upload({**upload.tree, **sent, **labels})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        w = T.mean([{k: u.tree[k] for k in server["w"]} for u in uploads], self.weights(uploads))
        heads = [T.keep(u.tree, self._head) for u in uploads]
        vectors = torch.stack([self._spread(u, "x:before") / max(int(u.tree["x:counts"].sum()), 1) for u in uploads])
        variances = torch.cat([u.tree["x:variance"] for u in uploads]).double()
        new = {u.sender: T.mean(heads, combination(i, vectors, variances)) for i, u in enumerate(uploads)}
        total = sum((self._spread(u, "x:means") for u in uploads), torch.zeros(()))
        n = sum((self._counts(u) for u in uploads), torch.zeros(()))[:, None]
        means = torch.where(n > 0, total / n.clamp(min=1), torch.nan).float()
        return {"w": w, "heads": {**server["heads"], **new}, "means": means}

    def _spread(self, u: Upload, name: str) -> Tensor:
        """Return the sums of features per class [classes, d]; zeros for classes that the client lacks."""
        out = torch.zeros(self.ctx.classes, self.ctx.net.width, dtype=torch.float64)
        out[u.tree["x:labels"].long()] = u.tree[name].double() * u.tree["x:counts"].double()[:, None]
        return out

    def _counts(self, u: Upload) -> Tensor:
        out = torch.zeros(self.ctx.classes, dtype=torch.float64)
        out[u.tree["x:labels"].long()] = u.tree["x:counts"].double()
        return out

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(self._model(state, download))

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "trained" and client.trained is not None:
            return Model(client.trained.params)  # no extras: their shapes differ from client to client
        return super().model(view, client)


def combination(i: int, vectors: Tensor, variances: Tensor) -> list[float]:
    """Return the weights a on the simplex that minimise a' (diag(variances) + G) a.

    G holds the inner products of the differences h_i - h_j of vectors [clients, classes, d]. If the constraint on the
    sum is dropped, the problem is non-negative least squares, whose solution lies on the simplex up to a factor.
    """
    gaps = (vectors[i] - vectors).flatten(1)
    P = torch.diag(variances) + gaps @ gaps.T
    P = P / P.diagonal().mean().clamp(min=1e-30)
    root = torch.linalg.cholesky(P + 1e-9 * torch.eye(len(P), dtype=P.dtype)).T
    ones = torch.linalg.solve_triangular(root.T, torch.ones(len(P), 1, dtype=P.dtype), upper=False)
    a, _ = nnls(root.numpy(), ones[:, 0].numpy())
    a = a / a.sum()
    return [float(x) for x in np.where(a > SMALL, a, 0.0)]
