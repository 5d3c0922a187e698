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
_AT_ONCE = 2**22  # draws in memory at a time


@dataclass(frozen=True)
class Difference:
    """The difference of two methods: mean over seeds of the mean over clients, with a bootstrap interval."""

    mean: float
    low: float
    high: float
    gain: int  # clients (of all seeds) with a positive difference
    lose: int
    tie: int  # clients with a difference of exactly 0
    seeds: int

    @property
    def clients(self) -> int:
        return self.gain + self.lose + self.tie

    @property
    def excludes_zero(self) -> bool:
        """True if the interval is entirely above or below 0."""
        return self.low > 0 or self.high < 0

    @property
    def covers(self) -> str:
        """The sources of variation that the interval covers; one seed does not cover others."""
        return "seeds and clients" if self.seeds > 1 else "clients"


def paired_differences(values: FloatArray, seeds: IntArray, resamples: int = RESAMPLES) -> list[Difference]:
    """Return a difference for each row of values [pairs, n]: a client's accuracy with one method minus with the other.

    `seeds` [n] are the seeds of the columns. All rows share their resamples, which depend on the sizes alone.
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
    """Return bootstrap means [resamples, pairs] of values [pairs, n].

    Seeds are drawn with replacement, and clients within each drawn seed. Means are taken over clients, then seeds.
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
        counts = sizes[drawn]  # clients to draw
        at = np.arange(sizes.max())
        client = first[drawn] + np.floor(rng.random((b, S, len(at))) * counts).astype(np.int64)
        weight = np.where(at < counts, 1 / (S * counts), 0.0)
        cell = np.arange(b)[:, None, None] * n + client
        weights = np.bincount(cell.ravel(), weight.ravel(), minlength=b * n).reshape(b, n)
        out.append(weights @ values.T)
    return np.concatenate(out)
