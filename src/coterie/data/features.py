"""Features of samples: what the frozen beginning of a network gives for them, computed once."""

from collections.abc import Callable

import torch
from torch import Tensor

PER_STEP = 32  # samples of one pass
LARGEST_STORE = 4 * 2**30  # bytes of all features; larger ones are computed in every batch instead


class SampleFeatures:
    """The features of all samples of a data set, computed when they are first asked for."""

    def __init__(self, compute: Callable[[Tensor], Tensor], samples: int, shape: tuple[int, ...]):
        self.compute = compute
        self.values = torch.empty(samples, *shape)  # pages are taken when they are written
        self.known = torch.zeros(samples, dtype=torch.bool)

    def of(self, index: Tensor, ready: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the features of these samples; `ready` returns the items of samples as a network takes them.

        The samples of one part of a client are always asked for together, so that results do not depend on the order.
        """
        for rows in torch.split(index[~self.known[index]], PER_STEP):
            self.values[rows] = self.compute(ready(rows))
            self.known[rows] = True
        return self.values[index]
