"""Gaussian noise: keyed by the seed in a simulation, from the operating system's randomness in a real federation."""

import math
import os
from collections.abc import Mapping

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from coterie.core.rng import torch_rng
from coterie.core.tree import Tree

_DRAWS = 4  # numbers behind one secret normal number, so that the gaps between floats do not reveal what was added to


def normals(count: int, keys: tuple[int, str, int, int] | None) -> Tensor:
    """Return standard normal numbers [count]; `keys` of (seed, purpose, round, client), or None for secret ones."""
    if keys is None:
        return secret_normals(count)
    return torch.randn(count, generator=torch_rng(*keys), dtype=torch.float64)


def secret_normals(count: int) -> Tensor:
    """Return standard normal numbers [count] from the operating system's cryptographic generator."""
    words = np.frombuffer(os.urandom(8 * _DRAWS * count), dtype=np.uint64).reshape(_DRAWS, count)
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return torch.from_numpy(ndtri(uniform).sum(axis=0) / math.sqrt(_DRAWS))


def noised(tree: Mapping[str, Tensor], deviation: float, keys: tuple[int, str, int, int] | None) -> Tree:
    """Return the tree with independent noise of this standard deviation added to every value."""
    numbers = normals(sum(v.numel() for v in tree.values()), keys) * deviation
    out, at = {}, 0
    for k in sorted(tree):
        n = tree[k].numel()
        value = tree[k].cpu().to(torch.float64) + numbers[at : at + n].reshape(tree[k].shape)
        out[k] = value.to(tree[k].dtype).to(tree[k].device)
        at += n
    return {k: out[k] for k in tree}
