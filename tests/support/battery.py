"""Parameters of tests that run over every registered method."""

import pytest

from coterie.cli.words import parents
from coterie.methods import find, known
from coterie.testing import CHECKS


def everything(names=CHECKS):
    """Return all pairs of method and check; checks of a method run in one process, where they share a run."""
    above = parents({m: find(m) for m in known()})
    marks = {m: [pytest.mark.xdist_group(m), *([pytest.mark.long] if above[m] else [])] for m in known()}
    return [pytest.param(m, n, marks=marks[m]) for m in known() for n in names]
