"""Every registered method passes the common battery."""

import pytest

from coterie.methods import known
from coterie.testing import CHECKS, check


def everything(names=CHECKS):
    """All checks of one method in a row and in one process, where they share a run."""
    return [pytest.param(m, n, marks=pytest.mark.xdist_group(m)) for m in known() for n in names]


@pytest.mark.parametrize(("method", "name"), everything())
def test_battery(method: str, name: str) -> None:
    check(method, name)
