"""Prototypes of FedPC: where they are taken, and how sets of them travel."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.context import ClientData, Context
from coterie.core.schema import Entry, class_ids, counts
from coterie.core.tree import Tree
from coterie.errors import CoterieError
from coterie.parts.prototypes import Prototypes, collect, from_sums

Feature = Literal["post_relu", "pre_relu"]
ROWS, IDS, COUNTS = "x:prototypes", "x:ids", "x:counts"  # of the classes present: [labels, d], [labels], [labels]


# ---- where they are taken --------------------------------------------------------------------------------------------
def pre_relu_layer(ctx: Context) -> str:
    """Return the name of the linear layer whose output, after the activation, enters the head."""
    layout = ctx.net.layout
    layer = next((name for name in reversed(layout.layers) if name != layout.head), "")
    if layer not in layout.of_kind("fc") or len(ctx.w0[f"{layer}.weight"]) != ctx.net.width:
        raise CoterieError("feature = pre_relu needs a model with a linear layer right before its head")
    return layer


def logits_and_features(ctx: Context, params: Tree, x: Tensor, where: Feature) -> tuple[Tensor, Tensor]:
    """Return the logits, and the features [batch, d] that enter the head or those before the last activation."""
    if where == "post_relu":
        return ctx.net.both(params, x)
    layer = pre_relu_layer(ctx)
    logits, (entering,) = ctx.net.inputs(params, x, [layer])
    return logits, F.linear(entering, params[f"{layer}.weight"], params.get(f"{layer}.bias"))


def own_prototypes(ctx: Context, params: Tree, data: ClientData, where: Feature) -> tuple[Prototypes, Tensor]:
    """Return the prototypes of a client's training part by this model, equation (2), and its counts [classes]."""
    return collect(lambda x: logits_and_features(ctx, params, x, where)[1], *data.train, data.classes)


# ---- how they travel -------------------------------------------------------------------------------------------------
def entries(rows: int | str, ctx: Context) -> dict[str, Entry]:
    """Return the entries of a prototype set in a payload: 4d + 4 bytes per class."""
    return {
        ROWS: Entry((rows, ctx.net.width), kind="prototype", part="prototypes"),
        IDS: class_ids(rows, ctx.classes, "prototypes"),
    }


def count_entry(rows: int | str) -> Entry:
    """Return the entry for the samples behind each prototype: 4 bytes more per class."""
    return replace(counts(rows, "prototypes"), low=1)


def to_payload(prototypes: Prototypes, counts: Tensor | None = None) -> Tree:
    """Return a set [classes, d] as a payload, with counts [classes] if given."""
    value, mask = prototypes
    tree = {ROWS: value[mask], IDS: mask.nonzero()[:, 0].int()}
    return tree if counts is None else {**tree, COUNTS: counts[mask].int()}


def from_payload(tree: Mapping[str, Tensor], classes: int, width: int) -> Prototypes:
    """Return the set of a payload, which is empty if the payload has no prototypes."""
    if IDS not in tree:
        return Prototypes(torch.zeros(classes, width), torch.zeros(classes, dtype=torch.bool))
    ids, rows = tree[IDS].long(), tree[ROWS]
    mask = torch.zeros(classes, dtype=torch.bool, device=rows.device)
    return Prototypes(rows.new_zeros(classes, width).index_copy(0, ids, rows), mask.index_fill(0, ids, True))


def unpack_all(trees: Sequence[Mapping[str, Tensor]], classes: int, width: int) -> Prototypes:
    """Return the sets [n, classes, d] of n payloads."""
    sets = [from_payload(t, classes, width) for t in trees]
    return Prototypes(torch.stack([s.value for s in sets]), torch.stack([s.mask for s in sets]))


def group_mean(trees: Sequence[Mapping[str, Tensor]], classes: int, width: int) -> Prototypes:
    """Return the mean of each class over the payloads that hold it: by their counts if they have any, else equal."""
    value, mask = unpack_all(trees, classes, width)
    if COUNTS in trees[0]:
        nothing = torch.zeros(classes, dtype=torch.int64)
        mask = torch.stack([nothing.index_copy(0, t[IDS].long(), t[COUNTS].long()) for t in trees])  # [n, classes]
    share = mask.to(value)
    return from_sums((value * share[..., None]).sum(0), share.sum(0))
