"""Paired differences: the same clients and seeds under two methods, with a bootstrap interval."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.rng import numpy_rng

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]

RESAMPLES = 10_000
COVERAGE = 0.95
_AT_ONCE = 2**22  # draws held in memory


@dataclass(frozen=True)
class Difference:
    """Of two methods, in shares: mean over seeds of the mean over clients, and what a bootstrap says about it."""

    mean: float
    low: float
    high: float
    gain: int  # clients (of all seeds) that do better
    lose: int
    tie: int  # a difference of exactly 0
    seeds: int

    @property
    def clients(self) -> int:
        return self.gain + self.lose + self.tie

    @property
    def covers(self) -> str:
        """What the interval is about: one seed says nothing about others."""
        return "seeds and clients" if self.seeds > 1 else "clients"


def paired_differences(values: FloatArray, seeds: IntArray, resamples: int = RESAMPLES) -> list[Difference]:
    """One for each row of values [pairs, n]: a client's accuracy under one method minus its accuracy under the other.

    `seeds` [n] says which seed a column is of. Rows share their resamples, which depend on the sizes alone.
    """
    low, high = np.quantile(resampled(values, seeds, resamples), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], axis=0)
    names = np.unique(seeds)
    means = np.stack([values[:, seeds == s].mean(1) for s in names]).mean(0)
    return [
        Difference(float(m), float(a), float(b), int((v > 0).sum()), int((v < 0).sum()), int((v == 0).sum()),
                   len(names))
        for m, a, b, v in zip(means, low, high, values, strict=True)
    ]  # fmt: skip


def resampled(values: FloatArray, seeds: IntArray, resamples: int = RESAMPLES) -> FloatArray:
    """Means [resamples, pairs] of values [pairs, n]: as many seeds as there are, drawn with replacement, and in each
    drawn seed as many of its clients, drawn with replacement; mean over clients, then over seeds.
    """
    order = np.argsort(seeds, kind="stable")
    values = values[:, order]
    sizes = np.unique(seeds, return_counts=True)[1]  # clients per seed
    first, S, n = np.cumsum(sizes) - sizes, len(sizes), len(seeds)
    rng = numpy_rng(0, "bootstrap", resamples, *sizes.tolist())
    step = max(1, _AT_ONCE // (S * int(sizes.max())))
    out = []
    for a in range(0, resamples, step):
        b = min(step, resamples - a)
        drawn = rng.integers(S, size=(b, S, 1))
        many = sizes[drawn]  # clients to draw
        at = np.arange(sizes.max())
        client = first[drawn] + np.floor(rng.random((b, S, len(at))) * many).astype(np.int64)
        weight = np.where(at < many, 1 / (S * many), 0.0)
        cell = np.arange(b)[:, None, None] * n + client
        weights = np.bincount(cell.ravel(), weight.ravel(), minlength=b * n).reshape(b, n)
        out.append(weights @ values.T)
    return np.concatenate(out)
