"""Heads in FedGMH: how a client mixes them and finds its critical entries, how the server trains them."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree as T
from coterie.core.method import Context
from coterie.core.tree import Tree
from coterie.errors import CoterieError, unknown
from coterie.methods.fedgmh.common import held_labels, masked_step
from coterie.methods.fedgmh.settings import FedGMHSettings
from coterie.parts.linear_heads import Heads, train_heads
from coterie.parts.masks import criticality, share_count, top_share
from coterie.parts.similarity import mix


def head_of(ctx: Context, tree: Tree) -> Tree:
    """The entries of the model's head."""
    return T.keep(tree, ctx.group("head").__contains__)


# ---- client ----------------------------------------------------------------------------------------------------------
def label_shares(counts: Tensor) -> Tensor:
    """Q [labels] that sums to 1."""
    total = counts.sum()
    if not total > 0:
        raise CoterieError("label shares need at least one training sample.")
    return counts.double() / total


def mix_heads(heads: Mapping[str, Tensor], shares: Tensor) -> Tree:
    """One head from a stacked tree of heads [labels, ...] by shares [labels]."""
    return {k: v[0] for k, v in mix(shares[None], heads).items()}


def average_in(own: Mapping[str, Tensor], other: Mapping[str, Tensor], share: float = 0.5) -> Tree:
    """Half own, half other, equations (10) and (11): the write-in of GMH-a and GMH-oa; or another share."""
    if share == 0.5:
        return {k: (v + other[k]) / 2 for k, v in own.items()}
    return {k: torch.lerp(v, other[k], share) for k, v in own.items()}


def rows_in(own: Mapping[str, Tensor], rows: Mapping[str, Tensor], labels: Tensor) -> Tree:
    """A head with these rows [labels, ...] in place of its own."""
    return {k: v.index_copy(0, labels.long(), rows[k]) for k, v in own.items()}


def critical_mask(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], beta: float, scope: Literal["head", "tensor"] = "head"
) -> Tree:
    """Mask of the floor(beta * L) entries of a head that local training moved most to effect."""
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
    if hp.heads == "common":
        return common_step(ctx, stack, features, labels, counts, hp)
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


def common_step(
    ctx: Context,
    stack: Mapping[str, Tensor],
    features: Sequence[Tensor],
    labels: Sequence[Tensor],
    counts: Sequence[Tensor] | None,
    hp: FedGMHSettings,
) -> Tree:
    """The common head [1, ...] trained on every vector among the labels of its sender."""
    weight, bias = ctx.net.head_names
    z, y, held = torch.cat(list(features)), torch.cat(list(labels)).long(), held_labels(list(labels), ctx.classes)
    z = F.normalize(z, dim=-1) if hp.feature_norm == "l2" else z
    n = torch.ones(len(z)).to(z) if counts is None else torch.cat(list(counts)).to(z)
    head = Heads(stack[weight][0], stack[bias][0] if bias else None)
    for _ in range(hp.server_steps):
        for part in torch.split(torch.arange(len(z)), hp.server_batch or len(z)):
            head = masked_step(head, z[part], y[part], held[part], n[part], hp.eta_h, hp.head_weight_decay)
    return {weight: head.weight[None]} | ({bias: head.bias[None]} if bias and head.bias is not None else {})
