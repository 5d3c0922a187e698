"""Data: sources, partitions and federations."""

from coterie.data.dataset import Dataset
from coterie.data.federation import Federation, PartitionSettings, federate
from coterie.data.sources import from_arrays, from_torch, known, load, save

__all__ = [
    "Dataset",
    "Federation",
    "PartitionSettings",
    "federate",
    "from_arrays",
    "from_torch",
    "known",
    "load",
    "save",
]
