"""After failures a federation must be what the same rounds in one process are, without those who failed."""

from pathlib import Path

from coterie.federation.localhost.trial import LocalFederation
from coterie.federation.replay import replay_differences


def same_as_replay(local: LocalFederation, folder: Path) -> None:
    """Every round once; server, edges, scores, private states and personal models to the bit."""
    assert replay_differences(local.out, folder, {i: local.state(i) for i in range(local.devices)}) == []
