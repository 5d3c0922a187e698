"""Groups of clients by their class prototypes: round 0 of FedPC."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coterie.core.rng import key
from coterie.errors import CoterieError, unknown
from coterie.methods.fedpc.mixing import group_means
from coterie.parts.clustering import canonical, coordinates, kmeans
from coterie.parts.prototypes import Prototypes, one_hot

Missing = Literal["zero", "mean", "masked"]


def prototype_groups(
    prototypes: Prototypes,
    groups: int | None,
    seed: int,
    j_max: int = 10,
    pca: float | int | None = 0.95,
    missing: Missing = "zero",
) -> Tensor:
    """Labels [n] of clients by their prototypes [n, classes, d]; `groups` None chooses the number by silhouette."""
    if missing == "masked":
        vectors = coordinates(masked_sqdist(prototypes))
        same = torch.cat([prototypes.value.double().flatten(1), prototypes.mask.double()], 1)
    else:
        same = vectors = prototype_vectors(prototypes, missing)
    _, first, inverse = np.unique(same.numpy(), axis=0, return_index=True, return_inverse=True)
    x = reduce(vectors, pca)[first[inverse.reshape(-1)]]  # identical clients stay identical whatever PCA rounds
    return choose_groups(x, j_max, seed) if groups is None else kmeans(x, groups, seed)


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


def group_centres(prototypes: Prototypes, labels: Tensor, count: int, missing: Missing) -> Prototypes:
    """Return the mean prototypes [groups, classes, d] of `count` groups, to which later clients are compared.

    Absent classes count as zeros where the clustering takes them as zeros.
    """
    if missing != "zero":
        return group_means(prototypes, labels, count)
    share = one_hot(labels, count).T / labels.bincount(minlength=count)[:, None]
    value = torch.einsum("jn,nkd->jkd", share, prototypes.value * prototypes.mask[..., None])
    return Prototypes(value, group_means(prototypes, labels, count).mask)


def nearest_group(own: Prototypes, centres: Prototypes, missing: Missing) -> int:
    """Return the group whose centre is nearest to a client's prototypes [classes, d], as the clustering compares."""
    if missing == "zero":
        return int((own.value - centres.value).square().sum((1, 2)).argmin())
    both = Prototypes(*(torch.cat([a[None], b]) for a, b in zip(own, centres, strict=True)))
    common = (own.mask & centres.mask).any(1)
    return int(masked_sqdist(both)[0, 1:].masked_fill(~common, torch.inf).argmin())


def reduce(vectors: Tensor, pca: float | int | None = 0.95, limit: int = 50) -> Tensor:
    """Centred rows on their principal components: the fewest with `pca` of the variance (or that many), <= limit."""
    x = vectors.double().numpy()
    x = x - x.mean(0)
    room = min(len(x) - 1, limit, x.shape[1])
    if pca is None:
        return torch.from_numpy(x)
    if room < 1 or not np.abs(x).max() > 0:
        return torch.zeros(len(x), 1, dtype=torch.float64)
    from sklearn.decomposition import PCA  # slow to import

    model = PCA(n_components=room, svd_solver="full").fit(x)
    if isinstance(pca, float) and pca <= 1:
        reached = np.cumsum(model.explained_variance_ratio_) >= pca - 1e-12
        keep = int(np.argmax(reached)) + 1 if reached.any() else room
    else:
        keep = min(int(pca), room)
    if keep < 1:
        raise CoterieError(f"pca must keep at least one component, got {pca}.")
    return torch.from_numpy(model.transform(x)[:, :keep])


def choose_groups(x: Tensor, j_max: int, seed: int) -> Tensor:
    """k-means with the J in 2..j_max of the best mean silhouette, ties to the smaller; equal rows only: one group."""
    from sklearn.metrics import silhouette_score  # slow to import

    data = x.double().numpy()
    distinct = len(np.unique(data, axis=0))
    best, best_score = torch.zeros(len(x), dtype=torch.int64), -np.inf
    for j in range(2, min(j_max, distinct, len(x) - 1) + 1):
        labels = kmeans(x, j, seed)
        score = float(silhouette_score(data, labels.numpy())) if int(labels.max()) > 0 else -np.inf
        if score > best_score + 1e-9:
            best, best_score = labels, score
    return best


def random_groups(labels: Tensor, content: Tensor, seed: int) -> Tensor:
    """Groups of the same sizes as labels [n] but assigned at random, as a control.

    The draw is a hash of each client's own content [n, ...], so that it does not depend on the clients' numbers.
    """
    sizes = torch.bincount(labels).sort(descending=True).values
    drawn = [key(seed, "random-groups", row.numpy().tobytes().hex()) for row in content]
    order = sorted(range(len(labels)), key=drawn.__getitem__)
    out = torch.empty_like(labels)
    out[order] = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return canonical(out)
