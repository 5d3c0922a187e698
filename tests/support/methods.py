"""The registered methods, apart from their variants."""

import pytest

from coterie.cli.words import parents
from coterie.methods import find, method_names

METHODS = [name for name, above in parents({m: find(m) for m in method_names()}).items() if above is None]
# all methods, as parameters of a test: those of variants are marked long
PARAMETERS = [pytest.param(m, marks=() if m in METHODS else pytest.mark.long) for m in method_names()]
