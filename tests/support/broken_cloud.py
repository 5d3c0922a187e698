"""A cloud whose method has an error; test_outages.py runs this file as a process."""

import sys
from typing import Any

from hostile_device import MARK  # a script finds its own folder, but not the package `support`

from coterie.cli import main
from coterie.methods.fedrep import FedRep


def break_method(how: str) -> None:
    """Let the method raise an error always, or only for marked uploads."""
    real = FedRep.aggregate

    def aggregate(self: Any, server: Any, uploads: Any, round: int) -> Any:
        first = [float(next(iter(u.tree.values())).reshape(-1)[0]) for u in uploads]
        if how == "always" or MARK in first:
            raise IndexError("index 99 is out of range")
        return real(self, server, uploads, round)

    FedRep.aggregate = aggregate  # type: ignore[method-assign]


if __name__ == "__main__":
    break_method(sys.argv.pop(1))
    main()
