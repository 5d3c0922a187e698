"""The graph of a secure sum: each client exchanges keys and shares with its neighbours only.

Up to NEIGHBOURS + 1 clients all are neighbours. Beyond, clients stand on a circle in an order that a digest of the
session decides, and each has the NEIGHBOURS nearest as neighbours (the Harary graph of Bell et al.). Every client can
compute the graph, so the server cannot choose a client's neighbours.
"""

import hashlib
from collections.abc import Sequence

NEIGHBOURS = 128  # even; docs/secure-aggregation.md says how likely it is that this is too few


def neighbour_graph(members: Sequence[int], session: str) -> dict[int, tuple[int, ...]]:
    """Return the neighbours of every client, in ascending order."""
    everyone = sorted(members)
    if len(everyone) <= NEIGHBOURS + 1:
        return {i: tuple(j for j in everyone if j != i) for i in everyone}
    key = hashlib.sha256(f"{session}\x1f{everyone}".encode()).digest()
    circle = sorted(everyone, key=lambda i: hashlib.sha256(key + i.to_bytes(8)).digest())
    n, half = len(circle), NEIGHBOURS // 2
    steps = [*range(-half, 0), *range(1, half + 1)]
    return {i: tuple(sorted(circle[(at + s) % n] for s in steps)) for at, i in enumerate(circle)}
