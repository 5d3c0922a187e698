"""Clusters of the mended version: how clients tell items apart, divided by modularity."""

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.methods.scfpfl.settings import ClusterSettings
from coterie.methods.scfpfl.spectral import embedded_clusters, spectral_embedding
from coterie.parts.clustering import canonical, kmeans

MOST_AT_ONCE = 10  # clusters of one division; these may be divided again
LEARNT = 0.2  # nats: clients whose answers depend less on the item have not learnt enough to be told apart


def logit_clusters(logits: Tensor, k0: int | str, seed: int) -> Tensor:
    """Return labels [n] of clients by their logits [n, items, classes]: k0 clusters, or the best division or none."""
    s = centred_similarity(logits)
    if isinstance(k0, int):
        k = min(k0, len(s))
        return embedded_clusters(s, k, k, seed, ClusterSettings(split="axis"))
    learnt = information(logits.softmax(-1)).median() >= LEARNT
    return divided(s, seed) if learnt else torch.zeros(len(s), dtype=torch.int64)


def centred_similarity(logits: Tensor) -> Tensor:
    """Return S [n, n], cosines of two clients' logits [n, items, classes] without each client's mean over the items.

    The mean is what a client answers to any item: its label shares. The rest is how it tells items apart.
    """
    flat = (logits.double() - logits.double().mean(1, keepdim=True)).flatten(1)
    unit = F.normalize(flat, dim=1, eps=1e-300)
    s = (unit @ unit.T).clamp(0, 1)
    return ((s + s.T) / 2).fill_diagonal_(1.0)


def modularity(similarity: Tensor, labels: Tensor) -> float:
    """Return how much more alike members of a cluster are than their degrees imply (Newman 2006); 0 for one cluster."""
    s = similarity.double().clone().fill_diagonal_(0.0)
    degree, total = s.sum(1), s.sum().clamp(min=1e-300)
    together = labels[:, None] == labels[None, :]
    return float(((s - degree[:, None] * degree / total) * together).sum() / total)


def information(predictions: Tensor) -> Tensor:
    """Return the mutual information [n], in nats, of item and answer in predictions [n, items, classes]."""

    def entropy(p: Tensor) -> Tensor:
        return -(p * p.clamp(min=1e-12).log()).sum(-1)

    return entropy(predictions.mean(1)) - entropy(predictions).mean(1)


def divided(similarity: Tensor, seed: int) -> Tensor:
    """Return labels [n] of the division of largest modularity, with its clusters divided in the same way.

    If no division has a modularity above 0, there is one cluster.
    """
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
