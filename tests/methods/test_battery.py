"""Every registered method passes the common battery; its variants do so in `make test-all`."""

import pytest

from coterie.testing import check
from support.battery import everything


@pytest.mark.parametrize(("method", "name"), everything())
def test_battery(method: str, name: str) -> None:
    check(method, name)
