"""CFL, clustered federated learning. Sattler, Mueller, Samek, IEEE TNNLS 2021 (arXiv 1910.01991).

There is one model per cluster. When a cluster's mean update is small but some member's update is large, the cluster is
cut in two by the cosine of the members' updates. Only members that answered vote on a split; an absent member follows
the half whose mean update is closer to its last known update, or stays in the first half if it has none. The paper's
gap criterion is not used (nor is it in the authors' code). Norms and cosines are those of trained parameters:
batch-norm statistics are averaged within the cluster, but say nothing about a gradient. The authors' optimisers live as
long as their client and keep their momentum: the run's `opt_state = keep` does that. A second split here names clients;
the authors' code names positions in the sub-matrix, which confuses clients.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, State
from coterie.core.method import Card, Download, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.parts.cluster_models import Clustered, vectors


class CFLSettings(Settings):
    eps1: float = Field(0.4, ge=0, description="split only if the norm of the mean update is below this")
    eps2: float = Field(1.6, ge=0, description="and the largest norm of an update above this")
    min_cluster: int = Field(2, ge=1, description="clusters of this size or smaller are not split")
    first_round: int = Field(20, ge=0, description="no split up to and including this round")


class CFL(Clustered):
    Settings = CFLSettings
    hp: CFLSettings
    card = Card("CFL", "Sattler et al., IEEE TNNLS 2021, arXiv 1910.01991", 2021, "C", personal="the cluster's model")
    weighting = "uniform"

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Clients upload updates and receive their cluster's model."""
        if link == "up":
            return Schema(like(T.drop(self.ctx.w0, self.stays), "update"))
        return self.model_schema

    def setup(self) -> State:
        return {
            "models": [T.clone(T.drop(self.ctx.w0, self.stays))],
            "cluster": dict.fromkeys(self.ctx.clients, 0),
            "last": {},  # client -> direction of its last update
        }

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return Download(each={i: server["models"][server["cluster"].get(i, 0)] for i in ids})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        return start.adding(start=start.params)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return state, Upload(T.sub(upload.tree, trained.extras["start"]))

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        models, cluster = list(server["models"]), dict(server["cluster"])
        D = vectors(self.ctx, [u.tree for u in uploads])  # updates [answers, P]
        last = {**server["last"], **{u.sender: d for u, d in zip(uploads, _unit(D), strict=True)}}
        for c in range(len(server["models"])):
            rows = [r for r, u in enumerate(uploads) if server["cluster"].get(u.sender, 0) == c]
            if not rows:
                continue
            halves, numbers = [rows], [c]
            if self._wants_split(D[rows], round):
                halves = [[rows[p] for p in half] for half in bipartition(D[rows])]  # positions back to uploads
                numbers = [c, len(models)]
                models.append(models[c])
                means = torch.stack([_unit(D[half]).mean(0) for half in halves])
                for i, number in server["cluster"].items():
                    if number == c and i in last:
                        cluster[i] = numbers[int((_unit(means) @ last[i]).argmax())]
                for half, number in zip(halves, numbers, strict=True):
                    cluster |= {uploads[r].sender: number for r in half}
            for half, number in zip(halves, numbers, strict=True):
                members = [uploads[r] for r in half]
                step = T.mean([u.tree for u in members], self.weights(members))
                models[number] = T.add(server["models"][c], step)
        return {"models": models, "cluster": cluster, "last": last}

    def _wants_split(self, D: Tensor, round: int) -> bool:
        if round <= self.hp.first_round or len(D) <= self.hp.min_cluster:
            return False
        return bool(D.mean(0).norm() < self.hp.eps1) and bool(D.norm(dim=1).max() > self.hp.eps2)


def bipartition(updates: Tensor) -> tuple[list[int], list[int]]:
    """Return the positions of the two halves whose largest mutual cosine is smallest (complete linkage on -cosine).

    The half that holds position 0 comes first, so the answer does not depend on the solver's labels.
    """
    from sklearn.cluster import AgglomerativeClustering  # slow to import

    unit = _unit(updates.double())
    labels = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete").fit_predict(
        (1 - unit @ unit.T).clamp(min=0).numpy()
    )
    first = [i for i, c in enumerate(labels) if c == labels[0]]
    return first, [i for i, c in enumerate(labels) if c != labels[0]]


def _unit(V: Tensor) -> Tensor:
    return torch.nn.functional.normalize(V, dim=-1)
