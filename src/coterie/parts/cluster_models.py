"""Bookkeeping of methods with one model per cluster of clients."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientId, Context, State
from coterie.core.method import Client, Download, Method, Model, Moment, Upload
from coterie.core.rng import key
from coterie.core.schema import Link, Schema
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts.clustering import coordinates, kmeans
from coterie.parts.initial_models import starts
from coterie.parts.similarity import pairwise_sqdist

V = TypeVar("V")


class Clustered(Method):
    """A method with one model per cluster and no global model.

    Its server's state holds `cluster`, the cluster of each client that has one, and a list of the clusters' models.
    """

    models: ClassVar[str] = "models"  # key of that list

    def global_model(self, server: State) -> Tree | None:
        return None

    def cluster_of(self, server: State) -> dict[ClientId, int]:
        return dict(server.get("cluster", {}))

    def facts(self, server: State) -> dict[str, Any]:
        return {"clusters": sizes(server["cluster"], len(server[self.models]))}

    def averaged(
        self, models: Sequence[Tree], uploads: Sequence[Upload], cluster: Mapping[ClientId, int]
    ) -> list[Tree]:
        """Replace each model by the mean of its members' uploads; a model without one stays."""
        out = list(models)
        for g in range(len(out)):
            if members := of_cluster(uploads, cluster, g):
                out[g] = T.mean([T.untagged(u.tree) for u in members], self.weights(members))
        return out

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view != "edge":
            return super().model(view, client)
        state, download, data = client.state, client.download, client.data
        if not self.ctx.w0.keys() - download.keys():
            return Model(download)
        return None if "own" in state else self.personal(state, download, data)  # one of several in the download


class SendsAllModels(Clustered):
    """A clustered method that sends the models of all clusters to every client; `groups` is the number of models."""

    def check(self) -> None:
        starts(self.ctx, min(2, self.hp.groups))

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Uploads hold one model, downloads all of them."""
        one = self.model_schema
        return Schema(numbered(dict.fromkeys(range(self.hp.groups), one.entries))) if link == "down" else one

    def setup(self) -> State:
        return {self.models: [T.drop(m, self.stays) for m in starts(self.ctx, self.hp.groups)], "cluster": {}}

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return Download(numbered(dict(enumerate(server[self.models]))))

    def received(self, state: State, download: Tree) -> list[Tree]:
        """Return the models of a download, each with the client's own entries."""
        return [{**T.tagged(str(g), download), **state.get("own", {})} for g in range(self.hp.groups)]


def numbered(models: Mapping[int, Mapping[str, V]]) -> dict[str, V]:
    """Put entries of several models into one dictionary, tagged with the models' numbers."""
    return {f"{g}{T.MARK}{k}": v for g, model in models.items() for k, v in model.items()}


def vectors(ctx: Context, trees: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return flattened trainable entries [n, P]; batch-norm statistics say nothing about distance."""
    names = sorted(k for k in trees[0] if k in ctx.net.trainable)
    return torch.stack([T.flatten(t, names) for t in trees])


def first_groups(ctx: Context, x: Tensor, groups: int) -> Tensor:
    """Return the labels [n] of k-means on rows [n, P], from pairwise distances, so that P does not matter."""
    if groups == 1:
        return torch.zeros(len(x), dtype=torch.int64)
    return kmeans(coordinates(pairwise_sqdist(x)), groups, key(ctx.seed, "first-groups"))


def sizes(cluster: Mapping[ClientId, int], count: int) -> list[int]:
    of = list(cluster.values())
    return [of.count(c) for c in range(count)]


def largest(cluster: Mapping[ClientId, int]) -> int:
    """Return the cluster with most members; a tie goes to the lower number."""
    count = sizes(cluster, max(cluster.values()) + 1)
    return count.index(max(count))


def of_cluster(uploads: Sequence[Upload], cluster: Mapping[ClientId, int], c: int) -> list[Upload]:
    """Return the uploads of one cluster's members, in order."""
    return [u for u in uploads if cluster.get(u.sender) == c]


def interpolated(a: Mapping[str, Tensor], b: Mapping[str, Tensor], step: float) -> Tree:
    """Return (1 - step) a + step b, exact at 0 and 1."""
    return {k: torch.lerp(v, b[k], step) for k, v in a.items()}
