"""Groups of clients: k-means, linkage, warm-started centres.

Labels are int64 [n], numbered by first appearance, so that equal partitions have equal labels.
"""

import warnings
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.errors import CoterieError, unknown
from coterie.parts.similarity import cosine, gram, pairwise_sqdist

FloatMatrix = npt.NDArray[np.float64]
MetricName = Literal["l1", "l2", "cosine"]
Linkage = Literal["single", "complete", "average", "ward"]


def canonical(labels: object) -> Tensor:
    """Return the partition with its labels numbered by first appearance."""
    values = np.asarray(labels)
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return torch.from_numpy(rank[inverse.reshape(-1)])


def members(labels: Tensor) -> list[list[int]]:
    """Return the positions of each group, in order."""
    return [(labels == g).nonzero().flatten().tolist() for g in range(int(labels.max()) + 1)] if len(labels) else []


def coordinates(sqdist: Tensor) -> Tensor:
    """Classical scaling: points [n, n] whose distances are the given ones, as far as a flat space allows."""
    centred = sqdist - sqdist.mean(0) - sqdist.mean(1, keepdim=True) + sqdist.mean()
    values, vectors = torch.linalg.eigh((centred + centred.T) / -4)
    points: Tensor = vectors.flip(1) * values.flip(0).clamp(min=0).sqrt()
    return points


def kmeans(x: Tensor, groups: int, seed: int, restarts: int = 10, iterations: int = 300) -> Tensor:
    """k-means++ with restarts; equal rows always share a label, so there are never more groups than distinct rows."""
    if not 1 <= groups <= len(x):
        raise CoterieError(f"cannot make {groups} groups of {len(x)} clients.")
    from sklearn.cluster import KMeans  # slow to import
    from sklearn.exceptions import ConvergenceWarning

    rows, inverse, counts = np.unique(x.double().numpy(), axis=0, return_inverse=True, return_counts=True)
    model = KMeans(min(groups, len(rows)), n_init=restarts, max_iter=iterations, random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        labels = model.fit_predict(rows, sample_weight=counts.astype(np.float64))
    return canonical(labels[inverse.reshape(-1)])


class Hierarchy(NamedTuple):
    labels: Tensor
    heights: Tensor  # heights of the n - 1 merges, rising
    threshold: float


def agglomerate(
    x: Tensor,
    metric: MetricName = "l2",
    method: Linkage = "ward",
    threshold: float | None = None,
    quantile: float | None = None,
    groups: int | None = None,
) -> Hierarchy:
    """Hierarchical clusters of rows [n, p] (FL+HC): cut at a threshold, a quantile of the heights, or a number."""
    if sum(v is not None for v in (threshold, quantile, groups)) != 1:
        raise CoterieError("give exactly one of threshold, quantile and groups.")
    if method == "ward" and metric != "l2":
        raise CoterieError(f"ward linkage needs the l2 metric, not {metric}.")
    if len(x) == 1:
        return Hierarchy(torch.zeros(1, dtype=torch.int64), torch.zeros(0), 0.0)
    from scipy.cluster.hierarchy import fcluster, linkage  # slow to import

    tree = linkage(_condensed(_metric_distances(x, metric)), method)
    heights = torch.from_numpy(tree[:, 2].copy())
    if groups is not None:
        cut = float(heights[-groups]) if groups <= len(heights) else 0.0
        return Hierarchy(canonical(fcluster(tree, groups, "maxclust")), heights, cut)
    cut = threshold if threshold is not None else float(torch.quantile(heights, quantile or 0.0))
    # a merge happens strictly below the threshold: 0 merges nothing, not even equal rows
    return Hierarchy(canonical(fcluster(tree, np.nextafter(cut, -np.inf), "distance")), heights, cut)


def assign(x: Tensor, centres: Tensor) -> Tensor:
    """Return the nearest centre [n] of rows [n, p]; a tie goes to the lower index."""
    return pairwise_sqdist(x, centres).argmin(1)


def recentre(x: Tensor, labels: Tensor, centres: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean of each centre's members [g, p]; a centre without members stays where it is."""
    hot = (labels[:, None] == torch.arange(len(centres), device=labels.device)).to(x)
    hot = hot if weight is None else hot * weight[:, None].to(x)
    total = hot.sum(0)[:, None]
    means = hot.T @ x / torch.where(total > 0, total, torch.ones_like(total))
    return torch.where(total > 0, means, centres)


def warm_kmeans(x: Tensor, centres: Tensor, iterations: int = 20) -> tuple[Tensor, Tensor]:
    """Lloyd steps from given centres until nothing moves; labels keep the numbers of the centres (CGPFL, FeSEM)."""
    labels = assign(x, centres)
    for _ in range(iterations):
        centres = recentre(x, labels, centres)
        new = assign(x, centres)
        if torch.equal(new, labels):
            break
        labels = new
    return labels, centres


def svd_features(updates: Tensor, count: int) -> Tensor:
    """Cosines [n, count] of updates [n, p] with their leading singular directions, by the Gram matrix (FedGroup)."""
    values, vectors = torch.linalg.eigh(gram(updates))
    keep = min(count, len(updates))
    u: Tensor = vectors.flip(1)[:, :keep] * values.flip(0)[:keep].clamp(min=0).sqrt()
    sign = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()  # the solver's sign is arbitrary
    norms = u.new_tensor(1e-12).maximum((vectors.square() * values.clamp(min=0)).sum(1).sqrt())
    return u * torch.where(sign == 0, 1.0, sign) / norms[:, None]


def _metric_distances(x: Tensor, metric: MetricName) -> FloatMatrix:
    if metric == "l2":
        out = pairwise_sqdist(x).sqrt()
    elif metric == "cosine":
        out = 1 - cosine(x, eps=1e-12)
    elif metric == "l1":
        out = torch.cdist(x.double(), x.double(), p=1)
    else:
        raise unknown("metric", metric, ("l1", "l2", "cosine"))
    return np.asarray(out.numpy(), dtype=np.float64)


def _condensed(distance: FloatMatrix) -> FloatMatrix:
    symmetric = (distance + distance.T) / 2
    np.fill_diagonal(symmetric, 0.0)
    from scipy.spatial.distance import squareform  # slow to import

    return np.asarray(squareform(symmetric, checks=False), dtype=np.float64)
