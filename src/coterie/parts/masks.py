"""Masks over the entries of models: the share that is largest or most critical (FedCAC, FedGMH, CD2-pFed)."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.errors import CoterieError, unknown

Scope = Literal["tensor", "whole"]


def share_count(share: float, n: int) -> int:
    """Return floor(share * n), tolerant of the product's rounding (0.29 * 100 is 29)."""
    if not 0 <= share <= 1:
        raise CoterieError(f"a share must lie in [0, 1], got {share}.")
    return math.floor(share * n + 1e-9)


def top_mask(score: Tensor, count: int) -> Tensor:
    """Boolean mask [..., p] of exactly `count` largest scores per row; ties go to the lower index."""
    order = score.sort(dim=-1, descending=True, stable=True).indices
    mask = torch.zeros_like(score, dtype=torch.bool)
    return mask.scatter(-1, order[..., :count], True)


def criticality(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tree:
    """Return |(after - before) * after| per entry: the importance of a parameter's change."""
    return {k: ((v - before[k]) * v).abs() for k, v in after.items()}


def top_share(scores: Mapping[str, Tensor], share: float, scope: Scope = "tensor") -> Tree:
    """Masks of the floor(share * size) largest scores, ranked per tensor or over all tensors together."""
    if scope == "tensor":
        return {k: top_mask(v.reshape(-1), share_count(share, v.numel())).reshape(v.shape) for k, v in scores.items()}
    if scope != "whole":
        raise unknown("mask scope", scope, ("tensor", "whole"))
    flat = torch.cat([v.reshape(-1) for v in scores.values()])
    mask = top_mask(flat, share_count(share, flat.numel()))
    parts = torch.split(mask, [v.numel() for v in scores.values()])
    return {k: part.reshape(v.shape) for (k, v), part in zip(scores.items(), parts, strict=True)}


def write_in(own: Mapping[str, Tensor], other: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tree:
    """Return `other` where the mask is set and `own` elsewhere, bit for bit."""
    return {k: torch.where(mask[k], other[k], v) for k, v in own.items()}
