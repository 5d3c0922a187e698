"""Data: sources, partitions and federations."""

from coterie.data.dataset import Dataset
from coterie.data.federation import Federation, PartitionSettings, federate
from coterie.data.sources import from_arrays, from_frame, from_torch, list_datasets, load_dataset, save_dataset

__all__ = [
    "Dataset",
    "Federation",
    "PartitionSettings",
    "federate",
    "from_arrays",
    "from_frame",
    "from_torch",
    "list_datasets",
    "load_dataset",
    "save_dataset",
]
