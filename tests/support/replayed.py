"""Comparison of a federation with its replay in one process."""

from pathlib import Path

from coterie.federation.localhost.trial import LocalFederation
from coterie.federation.replay import replay_differences


def same_as_replay(local: LocalFederation, folder: Path) -> None:
    """Assert that rounds, scores, states and personal models of a federation are those of its replay."""
    assert replay_differences(local.out, folder, {i: local.state(i) for i in range(local.devices)}) == []
