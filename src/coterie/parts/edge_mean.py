"""What an ECS-FL edge makes of the models it selected."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from coterie import tree as T
from coterie.method import Upload
from coterie.parts.similarity import inverse_distances
from coterie.tree import Tree

Aggregation = Literal["mean", "invdist", "invdist_all"]


def edge_mean(models: Sequence[Tree], d: Tensor, how: Aggregation, d_min: float, empty: Tree) -> tuple[Tree, Tensor]:
    """Mean of the models [n] at distances d [n], and the weight [1] it has at the cloud: |T| or the sum of 1/d."""
    if how == "mean":
        weights, total = torch.ones(len(models)), torch.tensor([len(models)], dtype=torch.int32)
    else:
        weights = inverse_distances(d, d_min)
        total = weights.sum().float().reshape(1)
    return (T.mean(models, weights) if models else empty), total


def ranks_by_size(uploads: Sequence[Upload]) -> list[int]:
    """Numbers for devices that do not depend on how they are called: their ranks by samples, then by id."""
    order = sorted(range(len(uploads)), key=lambda i: (uploads[i].samples, uploads[i].sender))
    return [order.index(i) for i in range(len(uploads))]
