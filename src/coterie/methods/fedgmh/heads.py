"""Heads in FedGMH: how a client mixes them and finds its critical entries, how the server trains them."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from coterie import tree as T
from coterie.errors import CoterieError, unknown
from coterie.method import Context
from coterie.methods.fedgmh.settings import FedGMHSettings
from coterie.parts.heads import Heads, train_heads
from coterie.parts.masks import criticality, top_share
from coterie.parts.similarity import mix
from coterie.tree import Tree


def head_of(ctx: Context, tree: Tree) -> Tree:
    """The entries of the model's head."""
    return T.keep(tree, ctx.group("head").__contains__)


# ---- client ----------------------------------------------------------------------------------------------------------
def label_shares(counts: Tensor) -> Tensor:
    """q [labels] that sums to 1."""
    total = counts.sum()
    if not total > 0:
        raise CoterieError("label shares need at least one training sample.")
    return counts.double() / total


def mix_heads(heads: Mapping[str, Tensor], shares: Tensor) -> Tree:
    """One head from a stacked tree of heads [labels, ...] by shares [labels]."""
    return {k: v[0] for k, v in mix(shares[None], heads).items()}


def average_in(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tree:
    """(own + other) / 2, equations (10) and (11): the write-in of GMH-a and GMH-oa."""
    return {k: (v + other[k]) / 2 for k, v in own.items()}


def critical_mask(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], beta: float, scope: Literal["head", "tensor"] = "head"
) -> Tree:
    """Mask of the floor(beta * L) entries of a head that local training moved most to effect."""
    if not 0 <= beta <= 1:
        raise CoterieError(f"beta must lie in [0, 1], got {beta}.")
    if scope not in ("head", "tensor"):
        raise unknown("mask_scope", scope, ("head", "tensor"))
    return top_share(criticality(before, after), beta, "whole" if scope == "head" else "tensor")


# ---- server ----------------------------------------------------------------------------------------------------------
def pack(labels: Tensor, features: Tensor, classes: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
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


def server_step(
    ctx: Context,
    stack: Mapping[str, Tensor],
    features: Sequence[Tensor],
    labels: Sequence[Tensor],
    counts: Sequence[Tensor] | None,
    hp: FedGMHSettings,
) -> Tree:
    """Heads [heads, ...] trained on what each client sent: features [labels, d], labels [labels], counts [labels].

    Equation (6). Head s learns from label s alone, a single head from everything. Every vector counts as much as any
    other of its label unless counts came with it; a head without any stays as it is.
    """
    weight, bias = ctx.net.head_names
    z = torch.cat(list(features))
    y = torch.cat(list(labels)).long()
    w = torch.ones(len(z)).to(z) if counts is None else torch.cat(list(counts)).to(z)

    if len(stack[weight]) == 1:
        z, y, w = z[None], y[None], w[None]
    else:
        z, w = pack(y, z, len(stack[weight]), w)
        y = label_targets(w)

    heads = Heads(stack[weight], stack[bias] if bias else None)
    new = train_heads(heads, z, y, w, hp.eta_h, hp.server_steps, hp.server_batch, hp.head_weight_decay, hp.feature_norm)
    return {weight: new.weight} | ({bias: new.bias} if bias and new.bias is not None else {})
