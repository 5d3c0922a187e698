"""Exact equalities between methods: PyTorch's operations compute all of them, not the kernels for some losses only."""

from collections.abc import Iterator

import pytest

from coterie.train import native


@pytest.fixture(autouse=True)
def pytorch_only(request: pytest.FixtureRequest) -> Iterator[None]:
    """Switch the kernels off, except for the battery, which compares a method with itself."""
    if request.path.name == "test_battery.py":
        yield
        return
    with native.switched_off():
        yield
