"""Building blocks of the convolutional nets."""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from coterie.errors import CoterieError
from coterie.train import native

ItemShape = tuple[int, ...]
NormKind = Literal["batch", "group", "none"]
GROUPS = 8  # most groups of a group norm


class Conv(NamedTuple):
    """Specification of a block: output channels, kernel size, padding, and whether it pools and normalises."""

    out: int
    kernel: int
    padding: int = 0
    pool: bool = True
    batch_norm: bool = False

    def side(self, n: int) -> int:
        """Return the length of a side of n after the block."""
        n = n + 2 * self.padding - self.kernel + 1
        return n // 2 if self.pool else n


class ConvBlock(nn.Module):
    """Convolution, optional batch norm, ReLU, optional max-pool 2; for pictures (dims 2) or signals (dims 1)."""

    def __init__(self, channels: int, spec: Conv, dims: int = 2):
        super().__init__()
        convolution, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv1d, nn.BatchNorm1d)
        self.conv = convolution(channels, spec.out, spec.kernel, padding=spec.padding)
        self.bn = norm(spec.out) if spec.batch_norm else None
        self.pool = spec.pool
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        if self.pool and type(self.conv) is nn.Conv2d:  # a convolution with an adapter computes more than its weight
            assert self.bn is None or isinstance(self.bn, nn.BatchNorm2d)
            return native.block(self.conv, self.bn, x)
        x = self.conv(x)
        if self.bn is not None:
            x = self.bn(x)
        return F.relu(F.max_pool1d(x, 2) if self.pool else x)


class Dense(nn.Module):
    """Fully connected layers fc1, fc2, ... with ReLU, then the classifier; the input is flat [batch, size]."""

    def __init__(
        self, size: int, hidden: Sequence[int], classes: int, bias: bool = True, blocks: Sequence[nn.Module] = ()
    ):
        super().__init__()
        self._blocks = _register(self, "block", blocks)
        self._fcs = _register(self, "fc", [nn.Linear(a, b) for a, b in pairwise([size, *hidden])])
        self.classifier = nn.Linear(hidden[-1] if hidden else size, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        for name in self._fcs:
            x = F.relu(getattr(self, name)(x))
        return self.classifier(x)  # type: ignore[no-any-return]


class ConvNet(Dense):
    """Layers block1, block2, ..., flatten, fc1, fc2, ..., classifier; `to` is the pooled size of the last block."""

    def __init__(
        self,
        shape: ItemShape,
        classes: int,
        blocks: Sequence[Conv],
        hidden: Sequence[int],
        *,
        bias: bool = True,
        to: tuple[int, ...] | None = None,
    ):
        channels, *sides = shape
        for spec in blocks:
            sides = [spec.side(n) for n in sides]
            if min(sides) < 1:
                raise CoterieError(f"items of shape {shape_text(shape)} are too small for this model's convolutions")
        inputs = [channels, *(spec.out for spec in blocks[:-1])]
        built = [ConvBlock(c, spec, len(sides)) for c, spec in zip(inputs, blocks, strict=True)]
        super().__init__(blocks[-1].out * prod(to or sides), hidden, classes, bias, built)
        self.pooled = None if to is None or list(to) == sides else to

    def forward(self, x: Tensor) -> Tensor:
        for name in self._blocks:
            x = getattr(self, name)(x)
        if self.pooled is not None:
            x = _mean_pool(x, self.pooled)
        return super().forward(x.flatten(1))


def norm_layer(kind: NormKind, channels: int, dims: int = 2) -> nn.Module:
    """Return a norm over pictures (dims 2), signals (1) or vectors (0)."""
    if kind == "batch":
        return nn.BatchNorm2d(channels) if dims == 2 else nn.BatchNorm1d(channels)
    return nn.GroupNorm(gcd(channels, GROUPS), channels) if kind == "group" else nn.Identity()


def _register(parent: nn.Module, name: str, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Add the modules as name1, name2, ..., so that state-dict names stay flat, and return these names."""
    for i, module in enumerate(modules, 1):
        parent.add_module(f"{name}{i}", module)
    return tuple(f"{name}{i}" for i in range(1, len(modules) + 1))


def _mean_pool(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.adaptive_avg_pool2d(x, (size[0], size[1])) if len(size) == 2 else F.adaptive_avg_pool1d(x, size[0])


def shape_text(shape: ItemShape) -> str:
    return "x".join(map(str, shape))
