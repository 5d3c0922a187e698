"""Which cluster or edge each client is with, or what it chose, from what a run has written."""

from collections.abc import Mapping
from typing import Any

from coterie.errors import CoterieError
from coterie.results.run import Run
from coterie.storage.checkpoint import newest


def has_edges(run: Run) -> bool:
    """Does an edge stand between the run's clients and its cloud?"""
    return any("device-edge" in e["bytes"] for e in run.events)


def kind(run: Run) -> str:
    """What clients of one group have in common: edge, choice or cluster."""
    if has_edges(run):
        return "edge"
    return "choice" if any("chosen" in e.get("facts", {}) for e in run.events) else "cluster"


def found(run: Run) -> dict[str, list[int]]:
    """Name -> clients; empty if the method makes no clusters or does not say which."""
    of = _from_events(run) or _from_checkpoint(run)
    if not of and has_edges(run):
        of = _from_method(run)
    groups: dict[str, list[int]] = {}
    for client, name in sorted(of.items()):
        groups.setdefault(name, []).append(client)
    return dict(sorted(groups.items(), key=lambda pair: pair[0].zfill(6)))


def _from_events(run: Run) -> dict[int, str]:
    """The newest map of clients to clusters, to the layer they keep or to what they chose, that the method logged."""
    for event in reversed(run.events):
        for name in ("clusters", "layer", "chosen"):
            if clients := _clients(event.get("facts", {}).get(name)):
                return clients
    return {}


def _from_checkpoint(run: Run) -> dict[int, str]:
    try:
        server = newest(run.path, str(run.description["method"]["name"])).server
    except CoterieError:
        return {}
    return _clients(server.get("cluster")) or _clients(server.get("groups"))


def _from_method(run: Run) -> dict[int, str]:
    """Asked of the method itself, which needs the run's data; without them nothing is drawn."""
    from coterie.results.report.figures.groups import members

    try:
        of = members(run)
    except CoterieError:
        return {}
    return {i: str(k) for i, k in of.items()}


def _clients(value: Any) -> dict[int, str]:
    if not isinstance(value, Mapping) or not value:
        return {}
    if not all(isinstance(k, int) or (isinstance(k, str) and k.isdigit()) for k in value):
        return {}
    if not all(isinstance(v, int | str) for v in value.values()):
        return {}
    return {int(k): str(v) for k, v in value.items()}
