"""Every registered method passes the common battery."""

import pytest

from coterie.methods import known
from coterie.testing import CHECKS, check


@pytest.mark.parametrize("method", known())
@pytest.mark.parametrize("name", CHECKS)
def test_battery(name: str, method: str) -> None:
    check(method, name)
