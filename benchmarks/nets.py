"""Networks that several benchmarks share."""

from torch import nn


def for_hapt(classes: int) -> nn.Module:
    """Return a network for HAPT's windows of 128 steps and six channels."""
    return nn.Sequential(
        nn.Conv1d(6, 12, 8, stride=4), nn.BatchNorm1d(12), nn.ReLU(),
        nn.Conv1d(12, 16, 6, stride=3), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, classes),
    )  # fmt: skip
