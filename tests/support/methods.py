"""The registered methods, apart from their variants."""

from coterie.cli.words import parents
from coterie.methods import find, method_names

METHODS = [name for name, above in parents({m: find(m) for m in method_names()}).items() if above is None]
