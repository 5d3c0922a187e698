"""Shamir's secret sharing of 32 bytes over a prime field. Shamir, Communications of the ACM 22 (1979).

A secret is the value at 0 of a random polynomial of degree threshold - 1. A share is its value at the number of the
holder. Any `threshold` shares give the polynomial; fewer are independent of the secret.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from coterie.errors import CoterieError

PRIME = 2**256 + 297  # the smallest prime above 2^256, so that every 32 bytes are an element of the field
SECRET_BYTES = 32
SHARE_BYTES = 33
_COEFFICIENT_BYTES = 48  # random bytes of a coefficient: 127 bits more than the field, so that it is uniform
_ATTEMPTS = 200  # subsets of shares that are tried when some of them are wrong

Draw = Callable[[int], bytes]  # returns this many random bytes


def split_secret(secret: bytes, holders: Sequence[int], threshold: int, draw: Draw) -> dict[int, bytes]:
    """Return a share for each holder, whose number must not be negative."""
    if not 1 <= threshold <= len(set(holders)) or min(holders) < 0:
        raise ValueError(f"a threshold of {threshold} is impossible with the holders {list(holders)}")
    polynomial = [int.from_bytes(draw(_COEFFICIENT_BYTES)) % PRIME for _ in range(threshold - 1)]
    polynomial.append(int.from_bytes(secret))
    return {i: _value(polynomial, i + 1).to_bytes(SHARE_BYTES) for i in holders}


def _value(polynomial: Sequence[int], x: int) -> int:
    """Return the value of a polynomial, whose coefficient of the highest power comes first."""
    y = 0
    for coefficient in polynomial:
        y = (y * x + coefficient) % PRIME
    return y


@lru_cache(1024)
def _factors(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each point the inverse of the product of its differences to the others."""
    factors = []
    for x in points:
        product = 1
        for other in points:
            if other != x:
                product = product * (x - other) % PRIME
        factors.append(pow(product, -1, PRIME))
    return tuple(factors)


def _interpolated(values: Mapping[int, int], at: int = 0) -> int:
    """Return the value at `at` of the polynomial through these points (Lagrange's formula)."""
    points = tuple(values)
    factors = _factors(points)
    before = [1]  # products of the differences to the points before each one
    for x in points:
        before.append(before[-1] * (at - x) % PRIME)
    after, total = 1, 0
    for n in range(len(points) - 1, -1, -1):
        total += factors[n] * values[points[n]] * before[n] % PRIME * after
        after = after * (at - points[n]) % PRIME
    return total % PRIME


@dataclass(frozen=True)
class Recovered:
    """A secret from shares, and the holders whose shares were wrong."""

    secret: bytes
    liars: tuple[int, ...] = ()


def recover_secret(shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool]) -> Recovered:
    """Return the secret for which `fits` is true; raise CoterieError if the shares do not give it.

    Wrong shares are found if there are more than `threshold` shares, as long as few of them are wrong.
    """
    values = {i + 1: int.from_bytes(shares[i]) for i in sorted(shares)}
    values = {x: y for x, y in values.items() if y < PRIME}
    if len(values) < threshold:
        raise CoterieError(f"{len(values)} shares of at least {threshold} arrived")
    points = tuple(values)
    for chosen in islice(_subsets(points, threshold), _ATTEMPTS):
        part = {x: values[x] for x in chosen}
        secret = _interpolated(part)
        if secret < 2 ** (8 * SECRET_BYTES) and fits(secret.to_bytes(SECRET_BYTES)):
            wrong = [x - 1 for x in points if x not in part and _interpolated(part, x) != values[x]]
            liars = (*wrong, *(i for i in shares if i + 1 not in values))
            return Recovered(secret.to_bytes(SECRET_BYTES), tuple(sorted(liars)))
    raise CoterieError("the shares do not give the secret that was announced")


def _subsets(points: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """Yield subsets of this size without end: the first points, and then random ones, the same in every call."""
    yield points[:size]
    rng = random.Random(0)
    while size < len(points):
        yield tuple(sorted(rng.sample(points, size)))
