"""A network in the style of MobileNetV2. Sandler, Howard, Zhu, Zhmoginov, Chen, CVPR 2018.

Pictures of less than 64x64 are halved three times instead of five, so that a feature map is left.
"""

from torch import Tensor, nn

from coterie.models.blocks import ItemShape, NormKind, norm_layer

# expansion, channels, blocks, stride of the first block
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class ConvNorm(nn.Sequential):
    """Convolution, norm and, unless `linear`, ReLU6."""

    def __init__(
        self, inner: int, out: int, kernel: int, stride: int, norm: NormKind, groups: int = 1, linear: bool = False
    ):
        conv = nn.Conv2d(inner, out, kernel, stride, kernel // 2, groups=groups, bias=norm == "none")
        super().__init__(conv, norm_layer(norm, out), nn.Identity() if linear else nn.ReLU6())


class InvertedResidual(nn.Module):
    """Widen by a 1x1 convolution, filter each channel, narrow without activation; a shortcut if shapes agree."""

    def __init__(self, inner: int, out: int, stride: int, expand: int, norm: NormKind):
        super().__init__()
        wide = inner * expand
        widen = [ConvNorm(inner, wide, 1, 1, norm)] if expand > 1 else []
        depthwise, narrow = (
            ConvNorm(wide, wide, 3, stride, norm, groups=wide),
            ConvNorm(wide, out, 1, 1, norm, linear=True),
        )
        self.conv = nn.Sequential(*widen, depthwise, narrow)
        self.shortcut = stride == 1 and inner == out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.shortcut else out


class MobileNetV2(nn.Module):
    """stem, layer1 to layer7, last, a mean over all positions, classifier; `width` multiplies all channels."""

    def __init__(self, shape: ItemShape, classes: int, width: float, norm: NormKind):
        super().__init__()
        small = min(shape[1:]) < 64

        def channels(n: int) -> int:
            return max(8, int(n * width + 4) // 8 * 8)

        inner = channels(32)
        self.stem = ConvNorm(shape[0], inner, 3, 1 if small else 2, norm)
        for i, (expand, out, count, first) in enumerate(_STAGES, 1):
            parts = []
            for j in range(count):
                stride = 1 if j or (small and i == 2) else first
                parts.append(InvertedResidual(inner, channels(out), stride, expand, norm))
                inner = channels(out)
            self.add_module(f"layer{i}", nn.Sequential(*parts))
        self.last = ConvNorm(inner, channels(1280), 1, 1, norm)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(channels(1280), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(1, len(_STAGES) + 1):
            x = getattr(self, f"layer{i}")(x)
        return self.classifier(self.pool(self.last(x)))  # type: ignore[no-any-return]
