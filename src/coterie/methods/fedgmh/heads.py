"""Heads per label in FedGMH: how a client mixes them and finds its critical entries, and how the server trains them."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.errors import CoterieError, unknown
from coterie.methods.fedgmh.settings import FeatureSettings
from coterie.parts.linear_heads import HeadNames, heads_of, heads_tree, train_heads
from coterie.parts.masks import criticality, share_count, top_share
from coterie.parts.similarity import mix


# ---- client ----------------------------------------------------------------------------------------------------------
def label_shares(counts: Tensor) -> Tensor:
    """Return the label shares Q [labels], which sum to 1."""
    total = counts.sum()
    if not total > 0:
        raise CoterieError("label shares need at least one training sample.")
    return counts.double() / total


def mix_heads(heads: Mapping[str, Tensor], shares: Tensor) -> Tree:
    """Return one head, mixed from a stacked tree of heads [labels, ...] by shares [labels]: the sum in equation (9)."""
    return {k: v[0] for k, v in mix(shares[None], heads).items()}


def critical_mask(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], beta: float, scope: Literal["head", "tensor"] = "head"
) -> Tree:
    """Return the mask of the floor(beta * L) most critical entries of a head, equations (7) and (8).

    Algorithm 1, lines 1 to 7.
    """
    if not 0 <= beta <= 1:
        raise CoterieError(f"beta must lie in [0, 1], got {beta}.")
    if scope not in ("head", "tensor"):
        raise unknown("mask_scope", scope, ("head", "tensor"))
    return top_share(criticality(before, after), beta, "whole" if scope == "head" else "tensor")


def square_mask(before: Mapping[str, Tensor], after: Mapping[str, Tensor], beta: float) -> Tree:
    """The mask of the authors' code, per tensor: change squared times value (signed) from the beta-th largest up.

    Where that is 1e-10 or less, from the smallest value above 1e-20 up; hence the mask hardly depends on beta.
    """
    out = {}
    for k, v in after.items():
        score = (v - before[k]).square() * v
        flat = score.flatten().sort(descending=True).values
        floor = flat[max(share_count(beta, len(flat)), 1) - 1]
        positive = flat[flat > 1e-20]
        if floor <= 1e-10:
            floor = positive[-1] if len(positive) else torch.tensor(torch.inf)
        out[k] = score >= floor
    return out


# ---- server ----------------------------------------------------------------------------------------------------------
def padded(labels: Tensor, features: Tensor, classes: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Vectors [v, d] sorted by label [v] into [classes, most, d] with weights [classes, most], 0 for padding."""
    order = labels.sort(stable=True).indices
    sorted_labels = labels[order]
    counts = torch.bincount(labels, minlength=classes)
    place = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[sorted_labels]
    most = int(counts.max()) if len(labels) else 0

    out = features.new_zeros(classes, most, features.shape[-1])
    filled = features.new_zeros(classes, most)
    given = features.new_ones(len(labels)) if weight is None else weight.to(features)
    return (
        out.index_put((sorted_labels, place), features[order]),
        filled.index_put((sorted_labels, place), given[order]),
    )


def label_targets(weight: Tensor) -> Tensor:
    """Targets [labels, v] of per-label heads: head s sees label s only."""
    return torch.arange(len(weight), device=weight.device)[:, None].expand(weight.shape)


def train_label_heads(
    names: HeadNames, heads: Mapping[str, Tensor], z: Tensor, y: Tensor, weight: Tensor, hp: FeatureSettings
) -> Tree:
    """Return heads [heads, ...] trained on features z [v, d] of labels y [v] with weights [v], equation (6).

    Head s learns from label s alone; a single head learns from all labels. A head without vectors stays as it is.
    """
    if len(heads[names[0]]) == 1:
        z, y, weight = z[None], y[None], weight[None]
    else:
        z, weight = padded(y, z, len(heads[names[0]]), weight)
        y = label_targets(weight)
    stack, decay = heads_of(names, heads), hp.head_weight_decay
    return heads_tree(names, train_heads(stack, z, y, weight, hp.eta_h, hp.server_steps, hp.server_batch, decay))
