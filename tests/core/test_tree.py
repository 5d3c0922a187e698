"""Arithmetic on trees."""

import math

import pytest
import torch

from coterie.core import tree as T


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


def test_distance_and_product_of_trees_have_the_right_derivatives_once_twice_and_stacked() -> None:
    draw = torch.Generator().manual_seed(3)
    shapes = {"w": (2, 3), "b": (2,), "s": ()}
    a, b = ({k: torch.randn(s, generator=draw).double().requires_grad_() for k, s in shapes.items()} for _ in range(2))
    flat = [*a.values(), *b.values()]

    def trees(values: tuple[torch.Tensor, ...]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return dict(zip(shapes, values[:3], strict=True)), dict(zip(shapes, values[3:], strict=True))

    def far(*values: torch.Tensor) -> torch.Tensor:
        x, y = trees(values)
        return T.sqdist(x, y, ["w", "s"])

    def product(*values: torch.Tensor) -> torch.Tensor:
        return T.dot(*trees(values))

    assert far(*flat).item() == pytest.approx(sum((a[k] - b[k]).square().sum().item() for k in ("w", "s")))
    assert product(*flat).item() == pytest.approx(sum((a[k] * b[k]).sum().item() for k in shapes))
    for function in (far, product):
        assert torch.autograd.gradcheck(function, flat)
        assert torch.autograd.gradgradcheck(function, flat)
        slopes = torch.autograd.grad(function(*flat), flat, allow_unused=True)
        stacked = torch.func.vmap(torch.func.grad(function, tuple(range(6))))(*(v.detach()[None] for v in flat))
        for v, one, many in zip(flat, slopes, stacked, strict=True):
            assert torch.allclose(torch.zeros_like(v) if one is None else one, many[0])
    assert float(T.sqdist(a, b, [])) == 0
