"""Every registered method passes the common battery; its variants and the dearest checks run in `make test-all`."""

import pytest

from coterie.methods import method_names
from coterie.testing import CHECKS, check
from support.methods import METHODS

# these checks train for longer; the quick tests run them for the five papers' methods and a method of each kind
DEAR = (
    "learns_a_small_task",
    "permuting_ids_permutes_results",
    "numbers_are_learned_or_refused",
    "a_newcomer_gets_a_model",
)
TRAINED = (
    "fedavg", "fedrep", "ditto", "ifca", "fedproto", "apfl", "scaffold", "autopilot",
    "fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl",
)  # fmt: skip


def marks(method, name):
    """Return the marks of a check: the checks of a method run in one process, where they share a run."""
    quick = method in METHODS and (name not in DEAR or method in TRAINED)
    return [pytest.mark.xdist_group(method), *([] if quick else [pytest.mark.long])]


CASES = [pytest.param(m, name, marks=marks(m, name), id=f"{m}-{name}") for m in method_names() for name in CHECKS]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_battery(method: str, name: str) -> None:
    check(method, name)
