"""Temporal convolutional network for signals. Bai, Kolter, Koltun, arXiv 1803.01271, 2018."""

import torch.nn.functional as F
from torch import Tensor, nn

from coterie.models.blocks import ItemShape, NormKind, norm_layer


class CausalBlock(nn.Module):
    """Two dilated convolutions that see the past only, and a shortcut."""

    def __init__(self, inner: int, out: int, kernel: int, dilation: int, norm: NormKind, dropout: float):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv1d(inner, out, kernel, dilation=dilation), norm_layer(norm, out, 1)
        self.conv2, self.norm2 = nn.Conv1d(out, out, kernel, dilation=dilation), norm_layer(norm, out, 1)
        self.shortcut = nn.Conv1d(inner, out, 1) if inner != out else nn.Identity()
        self.past, self.dropout = (kernel - 1) * dilation, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        z = self.dropout(F.relu(self.norm1(self.conv1(F.pad(x, (self.past, 0))))))
        z = self.dropout(F.relu(self.norm2(self.conv2(F.pad(z, (self.past, 0))))))
        return F.relu(z + self.shortcut(x))


class LastStep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., -1]


class TCN(nn.Module):
    """Blocks block1, block2, ... with dilations 1, 2, 4, ..., the last step, and the classifier."""

    def __init__(
        self, shape: ItemShape, classes: int, width: int, depth: int, kernel: int, norm: NormKind, dropout: float
    ):
        super().__init__()
        self._blocks = tuple(f"block{i + 1}" for i in range(depth))
        for i, name in enumerate(self._blocks):
            self.add_module(name, CausalBlock(width if i else shape[0], width, kernel, 2**i, norm, dropout))
        self.last = LastStep()
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for name in self._blocks:
            x = getattr(self, name)(x)
        return self.classifier(self.last(x))  # type: ignore[no-any-return]
