"""Every registered method passes the common battery; its variants do so in `make test-all`."""

import pytest

from coterie.methods import method_names
from coterie.testing import CHECKS, check
from support.methods import METHODS


def marks(method):
    """Return the marks of a method's checks: they run in one process, where they share a run."""
    return [pytest.mark.xdist_group(method), *([] if method in METHODS else [pytest.mark.long])]


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("method", [pytest.param(m, marks=marks(m)) for m in method_names()])
def test_battery(method: str, name: str) -> None:
    check(method, name)
