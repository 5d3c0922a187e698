"""The registered methods, apart from their variants."""

from coterie.cli.words import parents
from coterie.methods import find, known

METHODS = [name for name, above in parents({m: find(m) for m in known()}).items() if above is None]
