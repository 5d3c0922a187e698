"""Masks over the entries of models: most critical share (FedCAC, FedGMH), overlaps, private channels (CD2-pFed)."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from coterie.errors import CoterieError, unknown
from coterie.tree import Tree

Scope = Literal["tensor", "whole"]


def share_count(share: float, n: int) -> int:
    """floor(share * n), forgiving the rounding of the product (0.29 * 100 is 29)."""
    if not 0 <= share <= 1:
        raise CoterieError(f"a share must lie in [0, 1], got {share}.")
    return math.floor(share * n + 1e-9)


def top_mask(score: Tensor, count: int) -> Tensor:
    """Boolean mask [..., p] of exactly `count` largest scores per row; ties go to the lower index."""
    order = score.sort(dim=-1, descending=True, stable=True).indices
    mask = torch.zeros_like(score, dtype=torch.bool)
    return mask.scatter(-1, order[..., :count], True)


def criticality(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tree:
    """|(after - before) * after| per entry: how much the change of a parameter meant to the loss."""
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
    """`other` where the mask is set, `own` elsewhere, bit for bit."""
    return {k: torch.where(mask[k], other[k], v) for k, v in own.items()}


def overlap(masks: Tensor) -> Tensor:
    """O_ij = 1 - |M_i - M_j|_1 / (2 |M_i|) of masks [n, p], float64 [n, n]; an empty mask has overlap 1."""
    m = masks.double()
    size = m.sum(1)
    differ = size[:, None] + size[None, :] - 2 * (m @ m.T)
    full = torch.where(size > 0, 2 * size, torch.ones_like(size))[:, None]
    return torch.where(size[:, None] > 0, 1 - differ / full, torch.ones_like(differ))


def collaborators(overlaps: Tensor, round: int, beta: float) -> Tensor:
    """Who shares critical entries with whom [n, n]: overlap above a bar that rises from the mean to beyond the maximum
    of all pairs within beta rounds; everybody with itself."""
    if beta <= 0:
        raise CoterieError(f"FedCAC's beta must be positive, got {beta}.")
    eye = torch.eye(len(overlaps), dtype=torch.bool, device=overlaps.device)
    pairs = overlaps[~eye].double()
    if not len(pairs):
        return eye
    bar = pairs.mean() + round / beta * (pairs.max() - pairs.mean())
    return (overlaps.double() >= bar - 1e-9) | eye  # equal overlaps must pass whatever the rounding of their mean


def channel_mask(channels: int, share: float) -> Tensor:
    """Private channels [channels]: the first floor(share * channels), so that a growing share only adds to them."""
    return torch.arange(channels) < share_count(share, channels)


def private_entries(tensor: Tensor, share: float, dim: int = 0) -> Tensor:
    """Mask of the tensor's shape, set on private channels along `dim` (0: outputs; 1: inputs, for the classifier)."""
    view = [1] * tensor.ndim
    view[dim] = -1
    return channel_mask(tensor.shape[dim], share).to(tensor.device).reshape(view).expand(tensor.shape)
