"""Groups of clients: PCA and k-means with a chosen number of groups, linkage, warm-started centres.

Labels are int64 [n], numbered by first appearance, so that equal partitions have equal labels.
"""

import warnings
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import silhouette_score
from torch import Tensor

from coterie.errors import CoterieError, unknown
from coterie.parts.prototypes import Prototypes
from coterie.parts.similarity import cosine, gram, pairwise_sqdist

Array = npt.NDArray[np.float64]
Missing = Literal["zero", "mean", "masked"]
Metric = Literal["l1", "l2", "cosine"]
Linkage = Literal["single", "complete", "average", "ward"]


def canonical(labels: object) -> Tensor:
    """The same partition with labels numbered by first appearance."""
    values = np.asarray(labels)
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return torch.from_numpy(rank[inverse.reshape(-1)])


def members(labels: Tensor) -> list[list[int]]:
    """Positions of each group, in order."""
    return [(labels == g).nonzero().flatten().tolist() for g in range(int(labels.max()) + 1)] if len(labels) else []


def prototype_vectors(prototypes: Prototypes, missing: Literal["zero", "mean"] = "zero") -> Tensor:
    """Flat rows [n, classes * d]; absent classes as zeros, or as the mean over the clients that hold the class."""
    value, mask = prototypes
    held = mask.double().unsqueeze(-1)
    p = value.double() * held
    if missing == "zero":
        return p.flatten(1)
    if missing != "mean":
        raise unknown("missing", missing, ("zero", "mean", "masked"))
    mean = p.sum(0) / held.sum(0).clamp(min=1)
    return (p + (1 - held) * mean).flatten(1)


def masked_sqdist(prototypes: Prototypes) -> Tensor:
    """Squared distances [n, n] over common classes, scaled to all classes; no common class: the largest known one."""
    value, mask = prototypes
    held = mask.double()
    p = value.double() * held.unsqueeze(-1)
    own = p.square().sum(-1) @ held.T  # [i, j]: of i over the classes of j
    common = held @ held.T
    total = (own + own.T - 2 * p.flatten(1) @ p.flatten(1).T).clamp(min=0)
    scaled = total * mask.shape[1] / common.clamp(min=1)
    known = scaled[common > 0]
    far = known.max() if len(known) else scaled.new_ones(())
    return torch.where(common > 0, scaled, far).fill_diagonal_(0)


def coordinates(sqdist: Tensor) -> Tensor:
    """Classical scaling: points [n, n] whose distances are the given ones, as far as a flat space allows."""
    centred = sqdist - sqdist.mean(0) - sqdist.mean(1, keepdim=True) + sqdist.mean()
    values, vectors = torch.linalg.eigh((centred + centred.T) / -4)
    points: Tensor = vectors.flip(1) * values.flip(0).clamp(min=0).sqrt()
    return points


def reduce(vectors: Tensor, pca: float | int | None = 0.95, limit: int = 50) -> Tensor:
    """Centred rows on their principal components: the fewest with `pca` of the variance (or that many), <= limit."""
    x = vectors.double().numpy()
    x = x - x.mean(0)
    room = min(len(x) - 1, limit, x.shape[1])
    if pca is None:
        return torch.from_numpy(x)
    if room < 1 or not np.abs(x).max() > 0:
        return torch.zeros(len(x), 1, dtype=torch.float64)
    model = PCA(n_components=room, svd_solver="full").fit(x)
    if isinstance(pca, float) and pca <= 1:
        reached = np.cumsum(model.explained_variance_ratio_) >= pca - 1e-12
        keep = int(np.argmax(reached)) + 1 if reached.any() else room
    else:
        keep = min(int(pca), room)
    if keep < 1:
        raise CoterieError(f"pca must keep at least one component, got {pca}.")
    return torch.from_numpy(model.transform(x)[:, :keep])


def kmeans(x: Tensor, groups: int, seed: int, restarts: int = 10, iterations: int = 300) -> Tensor:
    """k-means++ with restarts; equal rows always share a label, so there are never more groups than distinct rows."""
    if not 1 <= groups <= len(x):
        raise CoterieError(f"cannot make {groups} groups of {len(x)} clients.")
    rows, inverse, counts = np.unique(x.double().numpy(), axis=0, return_inverse=True, return_counts=True)
    model = KMeans(min(groups, len(rows)), n_init=restarts, max_iter=iterations, random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        labels = model.fit_predict(rows, sample_weight=counts.astype(np.float64))
    return canonical(labels[inverse.reshape(-1)])


def choose_groups(x: Tensor, j_max: int, seed: int) -> Tensor:
    """k-means with the J in 2..j_max of the best mean silhouette, ties to the smaller; equal rows only: one group."""
    data = x.double().numpy()
    distinct = len(np.unique(data, axis=0))
    best, best_score = torch.zeros(len(x), dtype=torch.int64), -np.inf
    for j in range(2, min(j_max, distinct, len(x) - 1) + 1):
        labels = kmeans(x, j, seed)
        score = float(silhouette_score(data, labels.numpy())) if int(labels.max()) > 0 else -np.inf
        if score > best_score + 1e-9:
            best, best_score = labels, score
    return best


def prototype_groups(
    prototypes: Prototypes,
    groups: int | None,
    seed: int,
    j_max: int = 10,
    pca: float | int | None = 0.95,
    missing: Missing = "zero",
) -> Tensor:
    """FedPC's opening: clients by their prototypes [n, classes, d]; `groups` None chooses the number by silhouette."""
    if missing == "masked":
        vectors = coordinates(masked_sqdist(prototypes))
        same = torch.cat([prototypes.value.double().flatten(1), prototypes.mask.double()], 1)
    else:
        same = vectors = prototype_vectors(prototypes, missing)
    _, first, inverse = np.unique(same.numpy(), axis=0, return_index=True, return_inverse=True)
    x = reduce(vectors, pca)[first[inverse.reshape(-1)]]  # identical clients stay identical whatever PCA rounds
    return choose_groups(x, j_max, seed) if groups is None else kmeans(x, groups, seed)


class Hierarchy(NamedTuple):
    labels: Tensor
    heights: Tensor  # of the n - 1 merges, rising
    threshold: float


def agglomerate(
    x: Tensor,
    metric: Metric = "l2",
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
    tree = linkage(_condensed(_metric_distances(x, metric)), method)
    heights = torch.from_numpy(tree[:, 2].copy())
    if groups is not None:
        cut = float(heights[-groups]) if groups <= len(heights) else 0.0
        return Hierarchy(canonical(fcluster(tree, groups, "maxclust")), heights, cut)
    cut = threshold if threshold is not None else float(torch.quantile(heights, quantile or 0.0))
    # a merge happens strictly below the threshold: 0 leaves everybody alone, also equal rows
    return Hierarchy(canonical(fcluster(tree, np.nextafter(cut, -np.inf), "distance")), heights, cut)


def assign(x: Tensor, centres: Tensor) -> Tensor:
    """Nearest centre [n] of rows [n, p]; ties to the lower index."""
    return pairwise_sqdist(x, centres).argmin(1)


def recentre(x: Tensor, labels: Tensor, centres: Tensor, weight: Tensor | None = None) -> Tensor:
    """Means of the members of each centre [g, p]; a centre without members stays."""
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


def _metric_distances(x: Tensor, metric: Metric) -> Array:
    if metric == "l2":
        out = pairwise_sqdist(x).sqrt()
    elif metric == "cosine":
        out = 1 - cosine(x, eps=1e-12)
    elif metric == "l1":
        out = torch.cdist(x.double(), x.double(), p=1)
    else:
        raise unknown("metric", metric, ("l1", "l2", "cosine"))
    return np.asarray(out.numpy(), dtype=np.float64)


def _condensed(distance: Array) -> Array:
    symmetric = (distance + distance.T) / 2
    np.fill_diagonal(symmetric, 0.0)
    return np.asarray(squareform(symmetric, checks=False), dtype=np.float64)
