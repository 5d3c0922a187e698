"""Accounting of differential privacy: what a sequence of noised releases costs, and how much noise a budget needs.

A release is a sum of clipped contributions with Gaussian noise of `sigma` times the sensitivity. The contributions were
sampled independently with probability `rate` (Poisson sampling). Neighbouring data sets differ by one contribution
that is added or removed. The mathematics is that of Opacus, a maintained library: composition of Rényi differential
privacy (RDP), which gives an upper bound. Its PRV accountant computes a tighter value, for information.
"""

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from typing import Any

from scipy.optimize import brentq

from coterie.errors import CoterieError
from coterie.privacy.setting import LARGEST_SIGMA

_SMALLEST_SIGMA = 0.01
_TOLERANCE = 1e-3  # largest relative distance of a calibrated epsilon from its target, which it never exceeds
# orders at which Rényi divergences are computed: fine where little noise, large where much noise is optimal
ORDERS = (
    *(1 + x / 10 for x in range(1, 20)),
    *(3 + x / 5 for x in range(15)),
    *(6 + x / 2 for x in range(10)),
    *map(float, (*range(11, 48), *range(48, 96, 8), 96, 128, 192, 256, 512)),
)


@dataclass(frozen=True)
class Releases:
    """A number of equal releases."""

    sigma: float
    rate: float
    count: int


def check_installed() -> None:
    """Raise CoterieError if the accountant is not installed."""
    _opacus()


@cache
def _opacus() -> Any:
    root = logging.getLogger()
    before = list(root.handlers)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of packages that Opacus imports
            from opacus.accountants.analysis import rdp
    except ImportError:
        raise CoterieError('dp needs the extra "privacy": pip install "coterie[privacy]"') from None
    finally:  # Opacus configures the log of the whole program
        for handler in [h for h in root.handlers if h not in before]:
            root.removeHandler(handler)
    return rdp


@cache
def _divergences(sigma: float, rate: float) -> tuple[float, ...]:
    """Return the Rényi divergence of one release at each order."""
    return tuple(float(v) for v in _opacus().compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=list(ORDERS)))


def epsilon_of(releases: Iterable[Releases], delta: float) -> float:
    """Return the epsilon of all these releases together; 0 without releases."""
    spent = [r for r in releases if r.count and r.rate]
    if not spent:
        return 0.0
    each = [[r.count * v for v in _divergences(r.sigma, r.rate)] for r in spent]
    total = [sum(values) for values in zip(*each, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order is at the end of the list: the bound is valid, but loose
        epsilon, _ = _opacus().get_privacy_spent(orders=list(ORDERS), rdp=total, delta=delta)
    return max(0.0, float(epsilon))


def tight_epsilon(releases: Sequence[Releases], delta: float) -> float | None:
    """Return the epsilon that the PRV accountant computes; None if it fails, as it may for extreme values."""
    _opacus()
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(r.sigma, r.rate, r.count) for r in releases if r.count]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(accountant.get_epsilon(delta=delta))
    except (RuntimeError, ValueError, MemoryError, OverflowError):
        return None


@cache
def sigma_for(epsilon: float, delta: float, rate: float, count: int) -> float:
    """Return the least noise multiplier with which `count` releases cost at most epsilon.

    Raise CoterieError if no sensible amount of noise is enough.
    """

    def cost(sigma: float) -> float:
        return epsilon_of([Releases(sigma, rate, count)], delta)

    guess = max(0.5, rate * sqrt(2 * count * log(1 / delta)) / epsilon)  # right for many small releases
    low, high = guess / 1.3, guess * 1.3
    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > LARGEST_SIGMA:
            raise CoterieError(
                f"no amount of noise reaches epsilon = {epsilon:g} at delta = {delta:g} in {count} releases; use a "
                "larger epsilon or delta, or fewer rounds"
            )
    while cost(low) <= epsilon:
        low, high = low / 2, low
        if high < _SMALLEST_SIGMA:
            return high
    target = epsilon * (1 - _TOLERANCE / 2)
    sigma = exp(brentq(lambda x: cost(exp(x)) - target, log(low), log(high), xtol=_TOLERANCE / 4))
    while cost(sigma) > epsilon:
        sigma *= 1 + _TOLERANCE / 4
    return float(sigma)


def releases_within(epsilon: float, delta: float, sigma: float, rate: float) -> int:
    """Return how many equal releases a budget allows."""
    high = 1
    while high < 10**9 and epsilon_of([Releases(sigma, rate, high)], delta) <= epsilon:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        within = epsilon_of([Releases(sigma, rate, middle)], delta) <= epsilon
        low, high = (middle, high) if within else (low, middle)
    return low
