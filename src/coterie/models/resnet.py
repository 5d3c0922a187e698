"""Residual networks for pictures and signals. He, Zhang, Ren, Sun, CVPR 2016.

Layers are called stem.conv, stem.norm, layer1.0.conv1, layer1.0.norm1, ..., layer1.0.downsample.0 (convolution) and .1
(norm), and classifier. `layer_alias` maps the names of torchvision's models to these.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from coterie.models.blocks import ItemShape, NormKind, norm_layer


class Stem(nn.Module):
    """First convolution: 3x3, or 7x7 with stride 2 and a max-pool if it is `large`."""

    def __init__(self, channels: int, width: int, norm: NormKind, large: bool, dims: int):
        super().__init__()
        kernel, stride = (7, 2) if large else (3, 1)
        self.conv = _conv(channels, width, kernel, stride, norm, dims)
        self.norm = norm_layer(norm, width, dims)
        pool = nn.MaxPool2d if dims == 2 else nn.MaxPool1d
        self.pool = pool(3, 2, 1) if large else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.relu(self.norm(self.conv(x))))  # type: ignore[no-any-return]


class BasicBlock(nn.Module):
    """Two convolutions with norm, and a shortcut. A block without norm starts as its shortcut, so that it trains."""

    def __init__(self, inner: int, out: int, stride: int, norm: NormKind, dims: int, kernel: int):
        super().__init__()
        self.conv1, self.norm1 = _conv(inner, out, kernel, stride, norm, dims), norm_layer(norm, out, dims)
        self.conv2, self.norm2 = _conv(out, out, kernel, 1, norm, dims), norm_layer(norm, out, dims)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inner != out:
            self.downsample = nn.Sequential(_conv(inner, out, 1, stride, norm, dims), norm_layer(norm, out, dims))
        if norm == "none":
            nn.init.zeros_(self.conv2.weight)  # type: ignore[arg-type]  # a convolution's weight is a tensor
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(out + self.downsample(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A stem, stages layer1, layer2, ... of basic blocks, a mean over all positions, and the classifier."""

    def __init__(
        self,
        shape: ItemShape,
        classes: int,
        widths: Sequence[int],
        blocks: Sequence[int],
        norm: NormKind,
        large_stem: bool,
        kernel: int = 3,
    ):
        super().__init__()
        dims = len(shape) - 1
        self.stem = Stem(shape[0], widths[0], norm, large_stem, dims)
        inner, stages = widths[0], []
        for i, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            strides = [1 if i == 0 else 2] + [1] * (count - 1)
            parts = []
            for stride in strides:
                parts.append(BasicBlock(inner, width, stride, norm, dims, kernel))
                inner = width
            self.add_module(f"layer{i + 1}", nn.Sequential(*parts))
            stages.append(f"layer{i + 1}")
        self._stages = tuple(stages)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1) if dims == 2 else nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.classifier = nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in self._stages:
            x = getattr(self, name)(x)
        return self.classifier(self.pool(x))  # type: ignore[no-any-return]

    @staticmethod
    def layer_alias(layer: str) -> str:
        """Return the name of a layer that torchvision calls `layer`."""
        first = {"conv1": "stem.conv", "bn1": "stem.norm", "fc": "classifier"}
        return first.get(layer, layer.replace(".bn", ".norm"))


def _conv(inner: int, out: int, kernel: int, stride: int, norm: NormKind, dims: int) -> nn.Module:
    convolution = nn.Conv2d if dims == 2 else nn.Conv1d
    return convolution(inner, out, kernel, stride, kernel // 2, bias=norm == "none")


def picture_resnet(
    shape: ItemShape,
    classes: int,
    blocks: Sequence[int],
    width: int,
    norm: NormKind,
    stem: Literal["small", "large"] | None,
) -> ResNet:
    """Return a ResNet for pictures; the large stem is the default from 96x96."""
    large = min(shape[1:]) >= 96 if stem is None else stem == "large"
    return ResNet(shape, classes, [width * 2**i for i in range(len(blocks))], blocks, norm, large)
