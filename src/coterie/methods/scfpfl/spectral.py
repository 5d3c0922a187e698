"""Spectral clustering of clients by their predictions, refined by ISODATA (equations (1) to (8))."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import CoterieError, unknown
from coterie.methods.scfpfl.settings import ClusterSettings
from coterie.parts.clustering import assign, canonical, kmeans, recentre


def prediction_similarity(
    outputs: Tensor, predict: Literal["softmax", "logits"] = "softmax", self_similarity: bool = True
) -> Tensor:
    """Return S [n, n], the sum over public items of the cosines of outputs [n, items, classes], equation (1).

    Softmax outputs have no negative cosine; those of logits are clipped at 0.
    """
    n, items, _ = outputs.shape
    p = F.normalize(outputs.double(), dim=-1, eps=1e-300)
    if predict == "softmax":
        s = p.flatten(1) @ p.flatten(1).T
    elif predict == "logits":
        s = p.new_zeros(n, n)
        for part in torch.split(p.transpose(0, 1), 256):  # clipped per item, so the sum cannot be one product
            s = s + (part @ part.transpose(1, 2)).clamp(min=0).sum(0)
    else:
        raise unknown("predict", predict, ("softmax", "logits"))
    s = ((s + s.T) / 2).clamp(0, items)
    eye = torch.eye(n, dtype=torch.bool, device=s.device)
    return s.masked_fill(eye, float(items) if self_similarity else 0.0)


def laplacian(similarity: Tensor) -> Tensor:
    """Return the normalised Laplacian Q^-1/2 (Q - S) Q^-1/2 [n, n], equations (2) to (4).

    A client without any similarity has a row of zeros.
    """
    s = similarity.double()
    degree = s.sum(1)
    root = torch.where(degree > 0, degree, torch.ones_like(degree)).rsqrt() * (degree > 0)
    out = root[:, None] * (degree.diag() - s) * root[None, :]
    return (out + out.T) / 2


def eigengap(values: Tensor, smallest: int = 1, largest: int | None = None) -> int:
    """Return how many rising eigenvalues [n] lie before the widest gap; ties go to the smaller number."""
    gaps = values.diff()[smallest - 1 : largest]
    return smallest + int(gaps.argmax()) if len(gaps) else max(1, min(smallest, len(values)))


def cluster_count(similarity: Tensor, power: float = 3.0) -> int:
    """Return the number of clusters by the eigengap of the similarity, scaled to a diagonal of 1, raised to a power.

    Without the power the gap behind the first eigenvalue, which is always 0, wins: all clients are somewhat alike.
    Clusters have at least two members on average.
    """
    s = similarity.double() / similarity.double().max().clamp(min=1e-300)
    values = torch.linalg.eigvalsh(laplacian(s.fill_diagonal_(1.0) ** power))
    return eigengap(values, largest=max(1, len(s) // 2))


def prediction_clusters(outputs: Tensor, hp: ClusterSettings, seed: int) -> Tensor:
    """Return labels [n] of clients by their outputs [n, items, classes]; Algorithm 1, lines 5 to 6."""
    s = prediction_similarity(outputs, hp.predict, hp.self_similarity)
    count = cluster_count(s, hp.gap_power)

    def cut(k: int) -> Tensor:
        dims = {"k0": k, "eigengap": count}[hp.embed_dim] if isinstance(hp.embed_dim, str) else hp.embed_dim
        return embedded_clusters(s, k, dims, seed, hp)

    if isinstance(hp.k0, int):
        return cut(min(hp.k0, len(s)))
    k, labels = count, cut(count)
    while k > 1 and int(torch.bincount(labels).min()) == 1:
        k -= 1  # a client unlike all others, such as one that has not learnt yet, is counted but is no cluster
        labels = cut(k)
    return labels


def embedded_clusters(similarity: Tensor, k: int, dims: int, seed: int, hp: ClusterSettings) -> Tensor:
    """Return labels [n] of k clusters in the spectral embedding, refined by ISODATA.

    Rows are sorted by degree first, so that the seeded start does not depend on how clients are numbered.
    """
    order = similarity.sum(1).argsort(stable=True)
    rows, _ = spectral_embedding(similarity[order][:, order], min(dims, len(similarity)))
    labels = torch.empty(len(similarity), dtype=torch.int64)
    labels[order] = isodata(rows, k, seed, hp).labels
    return canonical(labels.numpy())


def spectral_embedding(similarity: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Return rows [n, dims] of unit norm from the eigenvectors of the smallest eigenvalues, and all eigenvalues [n].

    The rows are the samples a_1, ..., a_N that equation (5) assigns to centres.
    """
    if not 1 <= dims <= len(similarity):
        raise CoterieError(f"embed_dim must lie between 1 and the number of clients {len(similarity)}, got {dims}.")
    values, vectors = torch.linalg.eigh(laplacian(similarity))
    h = vectors[:, :dims]
    h = h * torch.where(h.gather(0, h.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0)  # the solver's sign is arbitrary
    return h / (h.norm(dim=1, keepdim=True) + 1e-12), values


class Isodata(NamedTuple):
    labels: Tensor  # [n]
    splits: int
    merges: int
    removed: int


def isodata(rows: Tensor, k0: int, seed: int, hp: ClusterSettings) -> Isodata:
    """Cluster rows [n, d] by k-means that drops small clusters, splits wide ones and merges near ones.

    Rows go to the nearest centre, equation (5), and the labels divide them without overlap, equation (8). As printed,
    splitting, equation (6), needs K <= k0/2 and merging, equation (7), needs K >= 2 k0. K starts at k0 and a split at
    most doubles it, so the printed rule never merges. `hp.isodata = classic` also acts between these bounds: it merges
    and splits in turn, as ISODATA does (Ball, Hall 1965). `off` is plain k-means.
    """
    n = len(rows)
    if not 1 <= k0 <= n:
        raise CoterieError(f"k0 must lie between 1 and the number of clients {n}, got {k0}.")
    x = rows.double()
    if hp.isodata == "off":
        return Isodata(kmeans(x, k0, seed), 0, 0, 0)
    least = max(1, n // (4 * k0)) if hp.n_min is None else hp.n_min
    from sklearn.cluster import kmeans_plusplus  # slow to import

    picked, _ = kmeans_plusplus(x.numpy(), k0, random_state=seed % 2**32)
    centres = torch.from_numpy(picked)
    before: Tensor | None = None
    splits = merges = removed = unchanged = 0
    turns = 2 if hp.isodata == "classic" else 1  # unchanged steps after which nothing can change any more
    for step in range(hp.max_iter + 1):
        labels, kept = _prune(x, assign(x, centres), centres, least)
        removed += len(centres) - len(kept)
        centres = recentre(x, labels, kept)
        unchanged = unchanged + 1 if before is not None and torch.equal(before, labels) else 0
        if unchanged == turns or step == hp.max_iter:
            break
        before = labels
        between = hp.isodata == "classic" and k0 / 2 < len(centres) < 2 * k0
        if len(centres) <= k0 / 2 or (between and step % 2):
            grown = _split(x, labels, centres, least, hp.delta_max, hp.split)
            splits += len(grown) - len(centres)
        elif len(centres) >= 2 * k0 or between:
            grown = _merge(labels, centres, hp.m_min)
            merges += len(centres) - len(grown)
        else:
            continue
        if len(grown) != len(centres):
            before, centres = None, grown
    return Isodata(canonical(labels.numpy()), splits, merges, removed)


def _prune(x: Tensor, labels: Tensor, centres: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Remove the smallest cluster and reassign its rows until none is below `least` or one is left."""
    while len(centres) > 1:
        sizes = torch.bincount(labels, minlength=len(centres))
        if int(sizes.min()) >= least:
            break
        gone = int(sizes.argmin())
        centres = torch.cat([centres[:gone], centres[gone + 1 :]])
        labels = assign(x, centres)
    return labels, centres


def _split(x: Tensor, labels: Tensor, centres: Tensor, least: int, delta_max: float, how: str) -> Tensor:
    """Split clusters with a variance above delta_max into two, equation (6)."""
    out = []
    for k, centre in enumerate(centres):
        own = x[labels == k]
        variance, axis = own.var(0, correction=0).max(0)
        if variance > delta_max and len(own) >= 2 * least:
            if how == "axis":
                offset = torch.zeros_like(centre)
                offset[axis] = variance.sqrt()
            else:
                offset = variance.expand_as(centre)  # as printed
            out += [centre + offset, centre - offset]
        else:
            out.append(centre)
    return torch.stack(out)


def _merge(labels: Tensor, centres: Tensor, m_min: float) -> Tensor:
    """Merge the nearest centres while they are nearer than m_min, equation (7)."""
    sizes = torch.bincount(labels, minlength=len(centres)).to(centres)
    while len(centres) > 1:
        distance = torch.cdist(centres, centres).fill_diagonal_(torch.inf)
        i, j = divmod(int(distance.argmin()), len(centres))
        if not distance[i, j] < m_min:
            break
        both = (sizes[i] * centres[i] + sizes[j] * centres[j]) / (sizes[i] + sizes[j])
        rest = [k for k in range(len(centres)) if k not in (i, j)]
        centres = torch.cat([both[None], centres[rest]])
        sizes = torch.cat([(sizes[i] + sizes[j])[None], sizes[rest]])
    return centres
