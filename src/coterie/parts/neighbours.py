"""Predictions from the nearest stored samples, by features."""

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_PROBABILITY = 1e-12  # probability of a class that no neighbour and no model expects


def votes(z: Tensor, keys: Tensor, labels: Tensor, k: int, scale: float, classes: int) -> Tensor:
    """Return probabilities [batch, classes] from the labels of the k nearest keys [n, d] of z [batch, d].

    A neighbour weighs exp(-distance^2 / (d * scale)).
    """
    near = torch.cdist(z, keys).square().topk(min(k, len(keys)), largest=False)
    # shifted by the nearest distance: far from all neighbours the kernel would underflow to zero for each of them
    closeness = torch.softmax(-near.values / (z.shape[1] * scale), 1)
    return (F.one_hot(labels[near.indices], classes).to(z) * closeness[..., None]).sum(1)
