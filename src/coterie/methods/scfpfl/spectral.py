"""Spectral embedding of clients by their predictions, and its ISODATA refinement (section 3.1 of the paper)."""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import CoterieError, unknown
from coterie.parts.clustering import assign, canonical, kmeans, recentre

MOST_AT_ONCE = 10  # clusters of one division; these may be divided again
LEARNT = 0.2  # nats: clients whose answers depend less on the item have not learnt enough to be told apart


def prediction_similarity(
    outputs: Tensor, predict: Literal["softmax", "logits"] = "softmax", self_similarity: bool = True
) -> Tensor:
    """S [n, n]: sum over public items of the cosine of outputs [n, items, classes] of two clients.

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


def centred_similarity(logits: Tensor) -> Tensor:
    """S [n, n]: cosines of all logits [n, items, classes] of two clients, each client's mean over the items taken away.

    The mean is what a client says whatever it is shown: its label shares. What is left is how it tells items apart.
    """
    flat = (logits.double() - logits.double().mean(1, keepdim=True)).flatten(1)
    unit = F.normalize(flat, dim=1, eps=1e-300)
    s = (unit @ unit.T).clamp(0, 1)
    return ((s + s.T) / 2).fill_diagonal_(1.0)


def modularity(similarity: Tensor, labels: Tensor) -> float:
    """How much more alike members of a cluster are than their degrees alone would have it (Newman 2006); 0 for one."""
    s = similarity.double().clone().fill_diagonal_(0.0)
    degree, total = s.sum(1), s.sum().clamp(min=1e-300)
    together = labels[:, None] == labels[None, :]
    return float(((s - degree[:, None] * degree / total) * together).sum() / total)


def information(predictions: Tensor) -> Tensor:
    """Nats [n] that an item tells about a client's answer: mutual information in predictions [n, items, classes]."""

    def entropy(p: Tensor) -> Tensor:
        return -(p * p.clamp(min=1e-12).log()).sum(-1)

    return entropy(predictions.mean(1)) - entropy(predictions).mean(1)


def laplacian(similarity: Tensor) -> Tensor:
    """Normalised Laplacian Q^-1/2 (Q - S) Q^-1/2 [n, n]; a client like nobody has a row of zeros."""
    s = similarity.double()
    degree = s.sum(1)
    root = torch.where(degree > 0, degree, torch.ones_like(degree)).rsqrt() * (degree > 0)
    out = root[:, None] * (degree.diag() - s) * root[None, :]
    return (out + out.T) / 2


def eigengap(values: Tensor, smallest: int = 1, largest: int | None = None) -> int:
    """Number of clusters: how many rising eigenvalues [n] lie before the widest gap; ties to the smaller number."""
    gaps = values.diff()[smallest - 1 : largest]
    return smallest + int(gaps.argmax()) if len(gaps) else max(1, min(smallest, len(values)))


def cluster_count(similarity: Tensor, power: float = 3.0) -> int:
    """Number of clusters by the eigengap of the similarity, scaled to a diagonal of 1 and raised to a power.

    Without the power the gap behind the first eigenvalue, which is always 0, wins: all clients are somewhat alike. A
    cluster has two members on average, at least.
    """
    s = similarity.double() / similarity.double().max().clamp(min=1e-300)
    values = torch.linalg.eigvalsh(laplacian(s.fill_diagonal_(1.0) ** power))
    return eigengap(values, largest=max(1, len(s) // 2))


def prediction_clusters(
    outputs: Tensor,
    k0: int | Literal["eigengap", "modularity"],
    seed: int,
    embed_dim: int | Literal["k0", "eigengap"] = "k0",
    predict: Literal["softmax", "logits"] = "softmax",
    self_similarity: bool = True,
    gap_power: float = 3.0,
    n_min: int | None = None,
    compare: Literal["items", "centred"] = "items",
    **refine: Any,
) -> Tensor:
    """Labels [n] of clients by their outputs [n, items, classes]; `refine` goes to isodata.

    Rows are sorted by degree first, so that the seeded start does not depend on the clients' numbers.
    """
    s = (
        centred_similarity(outputs)
        if compare == "centred"
        else prediction_similarity(outputs, predict, self_similarity)
    )
    order = s.sum(1).argsort(stable=True)
    found = cluster_count(s, gap_power)

    def cut(k: int) -> Tensor:
        dims = {"k0": k, "eigengap": found}[embed_dim] if isinstance(embed_dim, str) else embed_dim
        rows, _ = spectral_embedding(s[order][:, order], min(dims, len(s)))
        labels = torch.empty(len(s), dtype=torch.int64)
        labels[order] = isodata(rows, k, seed, n_min, **refine).labels
        return canonical(labels.numpy())

    if isinstance(k0, int):
        return cut(min(k0, len(s)))
    if k0 == "modularity":  # one cluster, unless some division is better than none
        tells = information(outputs.softmax(-1) if predict == "logits" else outputs).median() >= LEARNT
        return divided(s, seed) if tells else torch.zeros(len(s), dtype=torch.int64)
    k, labels = found, cut(found)
    while k > 1 and int(torch.bincount(labels).min()) == 1:
        k -= 1  # a client like nobody, such as one that has not learned yet, is counted but is no cluster
        labels = cut(k)
    return labels


def divided(similarity: Tensor, seed: int) -> Tensor:
    """Labels [n]: the division of largest modularity, its clusters divided in the same way; one if none is above 0."""
    whole = torch.zeros(len(similarity), dtype=torch.int64)
    best, top = whole, 1e-9
    order = similarity.sum(1).argsort(stable=True)
    for k in range(2, min(len(similarity) // 2, MOST_AT_ONCE) + 1):
        labels = torch.empty_like(whole)
        rows, _ = spectral_embedding(similarity[order][:, order], k)
        labels[order] = kmeans(rows, k, seed)
        if int(labels.bincount().min()) > 1 and (q := modularity(similarity, labels)) > top:
            best, top = labels, q
    if not bool(best.any()):
        return whole

    found = torch.empty_like(whole)
    for k in range(int(best.max()) + 1):
        own = (best == k).nonzero()[:, 0]
        found[own] = divided(similarity[own][:, own], seed) + len(similarity) * k  # numbers that do not meet
    return canonical(found.numpy())


def spectral_embedding(similarity: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Rows [n, dims] of unit norm from the eigenvectors of the smallest eigenvalues, and all eigenvalues [n]."""
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


def isodata(
    rows: Tensor,
    k0: int,
    seed: int,
    n_min: int | None = None,
    delta_max: float = 0.1,
    m_min: float = 0.5,
    max_iter: int = 20,
    split: Literal["axis", "all"] = "axis",
    mode: Literal["paper", "off"] = "paper",
) -> Isodata:
    """k-means that drops small clusters, splits wide ones when too few are left and merges near ones when too many.

    As printed, splitting needs K <= k0/2 and merging K >= 2 k0. `off` is plain k-means.
    """
    n = len(rows)
    if not 1 <= k0 <= n:
        raise CoterieError(f"k0 must lie between 1 and the number of clients {n}, got {k0}.")
    if split not in ("axis", "all"):
        raise unknown("split", split, ("axis", "all"))
    x = rows.double()
    if mode == "off":
        return Isodata(kmeans(x, k0, seed), 0, 0, 0)
    if mode != "paper":
        raise unknown("isodata", mode, ("paper", "off"))
    least = max(1, n // (4 * k0)) if n_min is None else n_min
    from sklearn.cluster import kmeans_plusplus  # slow to import

    picked, _ = kmeans_plusplus(x.numpy(), k0, random_state=seed % 2**32)
    centres = torch.from_numpy(picked)
    before: Tensor | None = None
    splits = merges = removed = 0
    for step in range(max_iter + 1):
        labels, kept = _prune(x, assign(x, centres), centres, least)
        removed += len(centres) - len(kept)
        centres = recentre(x, labels, kept)
        if (before is not None and torch.equal(before, labels)) or step == max_iter:
            break
        before = labels
        if len(centres) <= k0 / 2:
            grown = _split(x, labels, centres, least, delta_max, split)
            splits += len(grown) - len(centres)
        elif len(centres) >= 2 * k0:
            grown = _merge(labels, centres, m_min)
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
    out = []
    for k, centre in enumerate(centres):
        own = x[labels == k]
        variance, axis = own.var(0, correction=0).max(0)
        if variance > delta_max and len(own) >= 2 * least:
            if how == "axis":
                offset = torch.zeros_like(centre)
                offset[axis] = variance.sqrt()
            else:
                offset = variance.expand_as(centre)  # equation (6) as printed
            out += [centre + offset, centre - offset]
        else:
            out.append(centre)
    return torch.stack(out)


def _merge(labels: Tensor, centres: Tensor, m_min: float) -> Tensor:
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
