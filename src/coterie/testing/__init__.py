"""The common battery: checks that every method must pass, in this package or in yours.

import pytest
from coterie.testing import CHECKS, check

@pytest.mark.parametrize("name", CHECKS)
def test_my_method(name): check(MyMethod, name)
"""

from coterie.testing.checks import CHECKS, check, left_untrained
from coterie.testing.fixtures import (
    Bench,
    SmallNet,
    close_loop,
    decided,
    events,
    open_loop,
    play,
    small_data,
    small_numbers,
)
from coterie.testing.spies import Standard, Watched, standard

__all__ = [
    "CHECKS", "Bench", "SmallNet", "Standard", "Watched", "check", "close_loop", "decided", "events", "left_untrained",
    "open_loop", "play", "small_data", "small_numbers", "standard",
]  # fmt: skip
