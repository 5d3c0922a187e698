"""Cutting a set of updates in two."""

import torch
from sklearn.cluster import AgglomerativeClustering
from torch import Tensor


def bipartition(updates: Tensor) -> tuple[list[int], list[int]]:
    """Positions of the two halves with the smallest largest cosine across (complete linkage on minus the cosine).

    The half that holds position 0 comes first, so the answer does not depend on the solver's labels.
    """
    unit = torch.nn.functional.normalize(updates.double(), dim=1)
    labels = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete").fit_predict(
        (1 - unit @ unit.T).clamp(min=0).numpy()
    )
    first = [i for i, c in enumerate(labels) if c == labels[0]]
    return first, [i for i, c in enumerate(labels) if c != labels[0]]
