"""Similarity of clients and mixing of models by it; matrices [clients, clients] are float64, models keep theirs."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.errors import CoterieError, unknown

SimilarityMap = Literal["clip", "shift01", "abs"]
TINY = 1e-20  # lower bound of the product of two norms; adding it instead would make short updates look less similar
COLUMNS = 1 << 16  # columns converted to float64 at a time: exact sums without a second copy of all models


def gram(a: Tensor, b: Tensor | None = None) -> Tensor:
    """Inner products [m, n] of the rows of a [m, p] and b [n, p], summed in float64."""
    other = a if b is None else b
    total = torch.zeros(len(a), len(other), dtype=torch.float64, device=a.device)
    for left, right in zip(torch.split(a, COLUMNS, 1), torch.split(other, COLUMNS, 1), strict=True):
        total += left.double() @ right.double().T
    return (total + total.T) / 2 if b is None else total


def cosine(a: Tensor, b: Tensor | None = None, eps: float = TINY) -> Tensor:
    """Return cosines [m, n] of flat rows [m, p] and [n, p], in [-1, 1]; a zero row has cosine 0 with every row."""
    product = gram(a, b)
    left = _norms(a) if b is not None else product.diagonal().sqrt()
    right = _norms(b) if b is not None else left
    return (product / (left[:, None] * right[None, :]).clamp(min=eps)).clamp(-1, 1)


def cosine_rows(a: Tensor, b: Tensor | None = None, eps: float = TINY) -> Tensor:
    """Mean over rows r of cos(a[i, r], b[j, r]), a [m, r, p], b [n, r, p] (pFedSim, FedCMD)."""
    other = a if b is None else b
    left, right = a.double(), other.double()
    product = torch.einsum("irp,jrp->ijr", left, right)
    scale: Tensor = left.square().sum(2).sqrt()[:, None] * right.square().sum(2).sqrt()[None, :]
    return (product / scale.clamp(min=eps)).mean(2).clamp(-1, 1)


def map_similarity(cosines: Tensor, how: SimilarityMap = "clip") -> Tensor:
    """Map cosines to [0, 1]: negative ones to 0, all by (1 + s)/2, or all by |s|."""
    if how == "clip":
        return cosines.clamp(0, 1)
    if how == "shift01":
        return ((1 + cosines) / 2).clamp(0, 1)
    if how == "abs":
        return cosines.abs().clamp(max=1)
    raise unknown("similarity map", how, ("clip", "shift01", "abs"))


def sketch(x: Tensor, dims: int, rng: torch.Generator) -> Tensor:
    """Random projection [..., dims] of x [..., p]; equal generators preserve inner products in expectation."""
    if dims < 1:
        raise CoterieError(f"a sketch needs at least one dimension, got {dims}.")
    matrix = torch.randn(x.shape[-1], dims, generator=rng) / math.sqrt(dims)
    return x @ matrix.to(x)


def normalise_rows(weights: Tensor, fallback: Tensor) -> Tensor:
    """Divide rows by their sums; a row that sums to 0 becomes the row of `fallback` (broadcast to [m, n])."""
    total = weights.sum(-1, keepdim=True)
    safe = torch.where(total > 0, total, torch.ones_like(total))
    return torch.where(total > 0, weights / safe, fallback.to(weights))


def softmax_rows(similarity: Tensor, sharpness: float = 1.0, known: Tensor | None = None) -> Tensor:
    """Rows exp(sharpness * s) / sum, over the `known` entries [m, n] only; a row without any is 0."""
    scores = similarity * sharpness
    if known is None:
        return scores.softmax(-1)
    return scores.masked_fill(~known, -torch.inf).softmax(-1).nan_to_num(0.0)


def with_self(affinity: Tensor, self_weight: float) -> Tensor:
    """Rows with `self_weight` on the diagonal and the rest shared by affinity [n, n] (FedAP, HeurFedAMP).

    A client without any affinity to others keeps its own model.
    """
    if not 0 <= self_weight <= 1:
        raise CoterieError(f"the self weight must lie in [0, 1], got {self_weight}.")
    eye = torch.eye(len(affinity), dtype=affinity.dtype, device=affinity.device)
    others = normalise_rows(affinity * (1 - eye), eye)
    return self_weight * eye + (1 - self_weight) * others


def inverse_distances(distances: Tensor, floor: float = 1e-12) -> Tensor:
    """Return 1 / max(d, floor)."""
    return 1 / distances.clamp(min=floor)


def neg_log_weights(similarity: Tensor, cap: float = 0.9999) -> Tensor:
    """-log(1 - s) of s clipped to [0, cap], with the diagonal at the cap (pFedSim); not normalised."""
    s = similarity.clamp(0, cap)
    n = min(s.shape)
    eye = torch.eye(*s.shape, dtype=torch.bool, device=s.device) if s.shape == (n, n) else torch.zeros_like(s) > 0
    return -torch.log1p(-s.masked_fill(eye, cap))


def pairwise_sqdist(a: Tensor, b: Tensor | None = None) -> Tensor:
    """Squared Euclidean distances [m, n] of rows; both are centred first, so that near models keep their digits."""
    centre = (a if b is None else torch.cat([a, b])).mean(0)
    left = a - centre
    right = left if b is None else b - centre
    product = gram(left, None if b is None else right)
    one = product.diagonal() if b is None else _norms(left).square()
    two = one if b is None else _norms(right).square()
    out = (one[:, None] + two[None, :] - 2 * product).clamp(min=0)
    return out.fill_diagonal_(0) if b is None else out


def flatten_stack(stacked: Mapping[str, Tensor]) -> Tensor:
    """Return a stacked tree [n, ...] as rows [n, P]."""
    return torch.cat([v.flatten(1) for v in stacked.values()], 1)


def unflatten_stack(flat: Tensor, like: Mapping[str, Tensor]) -> Tree:
    """Inverse of flatten_stack: [m, P] to a stacked tree with m rows, in the dtypes of `like`."""
    parts = torch.split(flat, [v[0].numel() for v in like.values()], 1)
    return {k: part.reshape(-1, *v.shape[1:]).to(v.dtype) for (k, v), part in zip(like.items(), parts, strict=True)}


def mix(rows: Tensor, stacked: Mapping[str, Tensor]) -> Tree:
    """Return m mixtures of n models: rows [m, n] times the stacked tree [n, ...], as one matrix product."""
    flat = flatten_stack(stacked)
    return unflatten_stack(rows.to(flat) @ flat, stacked)


def _norms(x: Tensor) -> Tensor:
    """Row norms [n] of x [n, p] in float64."""
    return torch.stack([part.double().square().sum(1) for part in torch.split(x, COLUMNS, 1)]).sum(0).sqrt()
