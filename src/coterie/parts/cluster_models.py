"""Bookkeeping of methods with one model per cluster of clients."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientId, Context, State
from coterie.core.method import Client, Method, Model, Upload
from coterie.core.rng import key
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts.clustering import coordinates, kmeans
from coterie.parts.similarity import pairwise_sqdist


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

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view != "edge":
            return super().model(view, client)
        state, download, data = client.state, client.download, client.data
        if not self.ctx.w0.keys() - download.keys():
            return Model(download)
        return None if "own" in state else self.personal(state, download, data)  # one of several in the download


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


def towards(a: Mapping[str, Tensor], b: Mapping[str, Tensor], step: float) -> Tree:
    """Return (1 - step) a + step b, exact at 0 and 1."""
    return {k: torch.lerp(v, b[k], step) for k, v in a.items()}
