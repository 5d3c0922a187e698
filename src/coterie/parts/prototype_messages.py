"""Prototype sets as they travel: rows of the classes present, their ids, and counts if asked for."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie import tree as T
from coterie.errors import CoterieError
from coterie.method import Batch, ClientData, Context, cross_entropy
from coterie.parts.prototypes import Prototypes, collect, from_sums
from coterie.tree import Tree

Feature = Literal["post_relu", "pre_relu"]


def pack(prototypes: Prototypes, counts: Tensor | None = None) -> Tree:
    """A set [classes, d] as a payload of 4d + 4 bytes for each class present, 4d + 8 with counts [classes]."""
    value, mask = prototypes
    tree = {"x:prototypes": value[mask], "x:ids": mask.nonzero()[:, 0].int()}
    return tree if counts is None else {**tree, "x:counts": counts[mask].int()}


def unpack(tree: Mapping[str, Tensor], classes: int, width: int) -> Prototypes:
    """Inverse of pack; a payload without prototypes is the empty set."""
    mask = torch.zeros(classes, dtype=torch.bool)
    if "x:ids" not in tree:
        return Prototypes(torch.zeros(classes, width), mask)
    ids = tree["x:ids"].long()
    rows = tree["x:prototypes"]
    return Prototypes(rows.new_zeros(classes, width).index_copy(0, ids, rows), mask.index_fill(0, ids, True))


def unpack_all(trees: Sequence[Mapping[str, Tensor]], classes: int, width: int) -> tuple[Prototypes, Tensor]:
    """Sets [n, classes, d] of n payloads, and counts [n, classes]: 1 for each class present where none were sent."""
    sets = [unpack(t, classes, width) for t in trees]
    value, mask = torch.stack([s.value for s in sets]), torch.stack([s.mask for s in sets])
    counts = torch.stack(
        [
            torch.zeros(classes, dtype=torch.int64).index_copy(0, t["x:ids"].long(), t["x:counts"].long())
            if "x:counts" in t
            else s.mask.long()
            for t, s in zip(trees, sets, strict=True)
        ]
    )
    return Prototypes(value, mask), counts


def group_mean(trees: Sequence[Mapping[str, Tensor]], classes: int, width: int, by_counts: bool) -> Tree:
    """One payload of several: each class is the mean over those that hold it, equally or by counts; counts add up."""
    (value, mask), counts = unpack_all(trees, classes, width)
    share = (counts if by_counts else mask).to(value)
    return pack(from_sums((value * share[..., None]).sum(0), share.sum(0)), counts.sum(0))


def pre_relu_layer(ctx: Context) -> str:
    """The linear layer whose output, after the activation, enters the head."""
    layout = ctx.net.layout
    layer = next((name for name in reversed(layout.layers) if name != layout.head), "")
    if layout.kinds.get(layer) != "fc" or len(ctx.w0[f"{layer}.weight"]) != ctx.net.width:
        raise CoterieError("feature = pre_relu needs a model with a linear layer right before its head")
    return layer


def logits_and_features(ctx: Context, params: Tree, x: Tensor, where: Feature) -> tuple[Tensor, Tensor]:
    """Logits, and what enters the head [batch, d] or what that was before the last activation."""
    if where == "post_relu":
        return ctx.net.both(params, x)
    layer = pre_relu_layer(ctx)
    logits, (entering,) = ctx.net.inputs(params, x, [layer])
    return logits, F.linear(entering, params[f"{layer}.weight"], params.get(f"{layer}.bias"))


def ce_and_features(ctx: Context, params: Tree, batch: Batch, where: Feature) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and features of one pass."""
    logits, z = logits_and_features(ctx, params, batch.x, where)
    return cross_entropy(logits, batch), z


def own_prototypes(ctx: Context, params: Tree, data: ClientData, where: Feature) -> tuple[Prototypes, Tensor]:
    """Of a client's whole training part by this model, and its counts [classes]."""
    return collect(lambda x: logits_and_features(ctx, params, x, where)[1], *data.train, data.classes)


def bare(tree: Tree) -> Tree:
    """A payload without its prototypes."""
    return T.drop(tree, lambda name: name.startswith("x:"))
