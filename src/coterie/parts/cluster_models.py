"""Bookkeeping of methods with one model per cluster of clients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.method import ClientId, Context, Upload
from coterie.core.rng import key
from coterie.core.tree import Tree
from coterie.parts.clustering import coordinates, kmeans
from coterie.parts.similarity import pairwise_sqdist


def vectors(ctx: Context, trees: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Flattened trainable entries [n, P]; batch-norm statistics say nothing about distance."""
    names = sorted(k for k in trees[0] if k in ctx.net.trainable)
    return torch.stack([T.flatten(t, names) for t in trees])


def first_groups(ctx: Context, x: Tensor, groups: int) -> Tensor:
    """Labels [n] of k-means on rows [n, P], from a table of distances: P does not matter."""
    if groups == 1:
        return torch.zeros(len(x), dtype=torch.int64)
    return kmeans(coordinates(pairwise_sqdist(x)), groups, key(ctx.seed, "first-groups"))


def sizes(cluster: Mapping[ClientId, int], count: int) -> list[int]:
    of = list(cluster.values())
    return [of.count(c) for c in range(count)]


def largest(cluster: Mapping[ClientId, int]) -> int:
    """The cluster with most members; ties to the lower number."""
    count = sizes(cluster, max(cluster.values()) + 1)
    return count.index(max(count))


def of_cluster(uploads: Sequence[Upload], cluster: Mapping[ClientId, int], c: int) -> list[Upload]:
    """The uploads of one cluster's members, in order."""
    return [u for u in uploads if cluster.get(u.sender) == c]


def towards(a: Mapping[str, Tensor], b: Mapping[str, Tensor], step: float) -> Tree:
    """(1 - step) a + step b, exact at 0 and 1."""
    return {k: torch.lerp(v, b[k], step) for k, v in a.items()}
