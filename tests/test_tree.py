"""Arithmetic on trees."""

import math

import pytest
import torch

from coterie import tree as T


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_one_number_that_is_none_is_found_wherever_it_is(bad: float, dtype: torch.dtype) -> None:
    for at in (0, 7, 999):
        v = torch.randn(1000).to(dtype)
        assert T.finite({"a": torch.ones(3), "b": v})
        v[at] = bad
        assert not T.finite({"a": torch.ones(3), "b": v})
    assert not T.finite({"a": torch.tensor([math.inf, -math.inf, 1.0])})


def test_a_sum_that_overflows_is_no_reason_to_refuse() -> None:
    assert T.finite({"a": torch.full((10,), 3e38), "b": torch.full((10,), 6e4, dtype=torch.float16)})
    assert T.finite({"a": torch.empty(0), "b": torch.tensor([1]), "c": torch.tensor([True])})
