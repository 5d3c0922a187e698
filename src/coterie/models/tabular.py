"""Networks for rows of a table. Gorishniy, Rubachev, Khrulkov, Babenko, NeurIPS 2021; embeddings of numbers, 2022.

A category arrives as columns of 0 and 1, so the first linear layer holds a vector for each of its values.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from coterie.models.blocks import Dense, NormKind, norm_layer


class FeatureVectors(nn.Module):
    """A vector for each feature: relu(x w + b) with weights of its own [features, width]."""

    def __init__(self, features: int, width: int):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(v.weight.detach()) for v in (_rows(features, width) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x.unsqueeze(-1) * self.weight + self.bias).flatten(-2)


def _rows(features: int, width: int) -> nn.Embedding:
    table = nn.Embedding(features, width)
    nn.init.uniform_(table.weight, -1, 1)
    return table


class TabularMLP(Dense):
    """Vectors of the features, then dense layers."""

    def __init__(self, features: int, classes: int, embedding: int, hidden: list[int]):
        super().__init__(features * max(1, embedding), hidden, classes)
        self.embeddings = FeatureVectors(features, embedding) if embedding else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return super().forward(x if self.embeddings is None else self.embeddings(x))


class TabularBlock(nn.Module):
    """Norm, linear, ReLU, dropout, linear, and a shortcut."""

    def __init__(self, width: int, norm: NormKind, dropout: float):
        super().__init__()
        self.norm, self.dropout = norm_layer(norm, width, 0), nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.dropout(F.relu(self.fc1(self.norm(x)))))  # type: ignore[no-any-return]


class TabularResNet(nn.Module):
    """Vectors of the features, a linear layer, blocks block1, block2, ..., norm, ReLU, and the classifier."""

    def __init__(
        self, features: int, classes: int, embedding: int, width: int, depth: int, norm: NormKind, dropout: float
    ):
        super().__init__()
        self.embeddings = FeatureVectors(features, embedding) if embedding else nn.Identity()
        self.stem = nn.Linear(features * max(1, embedding), width)
        self._blocks = tuple(f"block{i + 1}" for i in range(depth))
        for name in self._blocks:
            self.add_module(name, TabularBlock(width, norm, dropout))
        self.norm = norm_layer(norm, width, 0)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.embeddings(x.flatten(1)))
        for name in self._blocks:
            x = getattr(self, name)(x)
        return self.classifier(F.relu(self.norm(x)))  # type: ignore[no-any-return]
