"""Fixed point: sums never wrap, are exact, and are as precise as 32 bits allow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.privacy.secure_sum.fixed_point import LARGEST_WORD, FixedPoint

bounds = st.floats(1e-6, 1e6)
clients = st.integers(1, 100_000)


@settings(max_examples=100, deadline=None)
@given(bounds, clients)
def test_the_largest_sum_does_not_wrap_and_a_finer_unit_would(bound: float, n: int) -> None:
    points = FixedPoint(bound, n)
    most = int(points.encode(np.array([bound]))[0])
    assert n * most <= LARGEST_WORD < 2 * n * (most + 1)
    assert n * int(points.encode(np.array([np.inf]))[0]) <= LARGEST_WORD


@settings(max_examples=50, deadline=None)
@given(bounds, st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_a_sum_of_words_is_the_sum_of_the_rounded_numbers(bound: float, shares: list[float]) -> None:
    points, values = FixedPoint(bound, len(shares)), np.array(shares) * bound
    words = np.zeros(1, np.uint32)
    for v in values:
        words += points.encode(np.array([v]))
    assert points.decode(words)[0] == sum(np.rint(values / points.unit)) * points.unit
    assert abs(points.decode(words)[0] - values.sum()) <= (len(shares) / 2 + 1) * points.unit


def test_numbers_beyond_the_bound_become_the_bound() -> None:
    points = FixedPoint(2.0, 10)
    assert points.decode(points.encode(np.array([5.0, -5.0, 2.0]))).tolist() == [2.0, -2.0, 2.0]


@pytest.mark.parametrize("n", [10, 1000])
def test_the_unit_is_within_a_factor_of_two_of_the_finest(n: int) -> None:
    assert 0.5 < FixedPoint(1.0, n).unit ** -1 * n / 2**31 <= 1
