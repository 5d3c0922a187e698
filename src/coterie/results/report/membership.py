"""The cluster, the edge or the choice of each client, read from a run's folder."""

from collections.abc import Mapping

from coterie.errors import CoterieError
from coterie.results.run import Run, names_by_client
from coterie.storage.checkpoint import newest


def has_edges(run: Run) -> bool:
    """True if there are edges between the run's clients and its cloud."""
    return any("device-edge" in e["bytes"] for e in run.events)


def group_kind(run: Run) -> str:
    """Return what the clients of a group have in common: edge, choice or cluster."""
    if has_edges(run):
        return "edge"
    return "choice" if any("chosen" in e.get("facts", {}) for e in run.events) else "cluster"


def client_groups(run: Run) -> dict[str, list[int]]:
    """Return group -> clients; empty if the method makes no groups or does not record them."""
    group_of = _from_events(run) or _from_checkpoint(run)
    if not group_of and has_edges(run):
        group_of = _from_method(run)
    groups: dict[str, list[int]] = {}
    for client, name in sorted(group_of.items()):
        groups.setdefault(name, []).append(client)
    return dict(sorted(groups.items(), key=lambda pair: pair[0].zfill(6)))


def _from_events(run: Run) -> dict[int, str]:
    """Return the newest logged mapping of clients to clusters, to layers or to choices."""
    for event in reversed(run.events):
        for name in ("clusters", "layer", "chosen"):
            if clients := names_by_client(event.get("facts", {}).get(name)):
                return clients
    return {}


def _from_checkpoint(run: Run) -> dict[int, str]:
    try:
        server = newest(run.path, str(run.description["method"]["name"])).server
    except CoterieError:
        return {}
    if not isinstance(server, Mapping):
        return {}
    return names_by_client(server.get("cluster")) or names_by_client(server.get("groups"))


def _from_method(run: Run) -> dict[int, str]:
    """Return the edge of each client from the method; empty if the run's data are not available."""
    from coterie.results.report.figures.groups import cluster_by_client

    try:
        return {i: str(k) for i, k in cluster_by_client(run).items()}
    except CoterieError:
        return {}
