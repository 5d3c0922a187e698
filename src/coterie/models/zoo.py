"""The built-in models by name: factories (shape, classes, *, options) -> nn.Module.

The papers' nets have the layers and sizes that the papers print. Every net ends in `classifier`. Hidden fully
connected layers are called fc1, fc2, ...; convolutions are called block1.conv, block2.conv, ..., and their batch norms
block1.bn, block2.bn, ...
"""

from collections.abc import Callable
from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from coterie.errors import CoterieError
from coterie.models.blocks import Conv, ConvNet, Dense, ItemShape, NormKind, norm_layer, shape_text
from coterie.models.mobilenet import MobileNetV2
from coterie.models.resnet import ResNet, picture_resnet
from coterie.models.tabular import TabularMLP, TabularResNet
from coterie.models.tcn import TCN
from coterie.models.transformer import TextTransformer, VisionTransformer
from coterie.models.vgg import VGG11

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
StemKind = Literal["small", "large"]


def _listed(value: Any) -> Any:
    """Turn 64, [128, 64] or "128,64" into a list of widths."""
    if isinstance(value, str):
        return list(value.replace(",", " ").split())
    return [value] if isinstance(value, int) else value


Widths = Annotated[tuple[Positive, ...], BeforeValidator(_listed)]


def lenet5(shape: ItemShape, classes: int, *, batch_norm: bool = True, fc: Literal[3, 2] = 3) -> nn.Module:
    """LeNet5 of the FedCPMD paper: two 5x5 convolutions (6, 16) with batch norm, fully connected 120, 84."""
    _picture("lenet5", shape, 16)
    blocks = [Conv(6, 5, batch_norm=batch_norm), Conv(16, 5, batch_norm=batch_norm)]
    return ConvNet(shape, classes, blocks, [120, 84][: fc - 1])


def lenet5_nobn(shape: ItemShape, classes: int, *, fc: Literal[3, 2] = 3) -> nn.Module:
    """LeNet5 without batch norm."""
    return lenet5(shape, classes, batch_norm=False, fc=fc)


def lenet5_2fc(shape: ItemShape, classes: int, *, batch_norm: bool = True) -> nn.Module:
    """LeNet5 with two fully connected layers instead of three."""
    return lenet5(shape, classes, batch_norm=batch_norm, fc=2)


def fedpc_cnn(shape: ItemShape, classes: int, *, classifier_bias: bool = True) -> nn.Module:
    """CNN of the FedPC paper: two 5x5 convolutions (64, 64), fully connected 384, 192."""
    _picture("fedpc-cnn", shape, 16)
    return ConvNet(shape, classes, [Conv(64, 5), Conv(64, 5)], [384, 192], bias=classifier_bias)


def fedgmh_cnn(shape: ItemShape, classes: int) -> nn.Module:
    """Four-layer CNN of the FedGMH paper: two 5x5 convolutions (32, 64), fully connected 512."""
    _picture("fedgmh-cnn", shape, 16)
    return ConvNet(shape, classes, [Conv(32, 5), Conv(64, 5)], [512])


def ecsfl_cnn(
    shape: ItemShape,
    classes: int,
    *,
    padding: Literal[1, 0] = 1,
    fc_in: Literal["adaptive_2x3", "flatten"] = "adaptive_2x3",
) -> nn.Module:
    """CNN of the ECS-FL paper: four 3x3 convolutions (32, 32, 64, 64), fully connected 384x192 and 192xclasses.

    The paper does not say how the convolutions end in 384 numbers: their output is pooled to 64 x 2 x 3. With
    `flatten` a third fully connected layer makes 384 of all of them.
    """
    _picture("ecsfl-cnn", shape, 4 if padding else 16)
    blocks = [Conv(out, 3, padding, pool) for out, pool in [(32, False), (32, True), (64, False), (64, True)]]
    if fc_in == "adaptive_2x3":
        return ConvNet(shape, classes, blocks, [192], to=(2, 3))
    return ConvNet(shape, classes, blocks, [384, 192])


def scfpfl_cnn(shape: ItemShape, classes: int) -> nn.Module:
    """CNN of the SC-FPFL paper: two 5x5 convolutions (6, 16) and one linear layer."""
    _picture("scfpfl-cnn", shape, 16)
    return ConvNet(shape, classes, [Conv(6, 5), Conv(16, 5)], [])


def vgg11(
    shape: ItemShape,
    classes: int,
    *,
    head_input: Literal[512, 2048, 25088] | None = None,
    resize: Literal["pad", "bilinear"] = "pad",
    pretrained_path: str | None = None,
) -> nn.Module:
    """VGG11 without batch norm; the default input size of fc1 fits the picture (512 at 32x32, 2048 at 64x64)."""
    _picture("vgg11", shape, 1)
    net = VGG11(shape, classes, head_input, resize)
    if pretrained_path is not None:
        net.load_pretrained(pretrained_path)
    return net


class Flat(Dense):
    """Dense layers on the flattened item."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


class NormFlat(Flat):
    """Dense layers on the flattened item, with batch norm (bn1, bn2, ...) before each ReLU."""

    def __init__(self, size: int, hidden: list[int], classes: int):
        super().__init__(size, hidden, classes)
        for i, width in enumerate(hidden, 1):
            self.add_module(f"bn{i}", nn.BatchNorm1d(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for name in self._fcs:
            x = torch.relu(getattr(self, name.replace("fc", "bn"))(getattr(self, name)(x)))
        return self.classifier(x)  # type: ignore[no-any-return]


def mlp(shape: ItemShape, classes: int, *, hidden: Widths = (64,), batch_norm: bool = False) -> nn.Module:
    """Fully connected net; `hidden` lists the widths of its hidden layers."""
    return (NormFlat if batch_norm else Flat)(prod(shape), list(hidden), classes)


def mlp_bn(shape: ItemShape, classes: int, *, hidden: Widths = (64, 32)) -> nn.Module:
    """Small fully connected net with batch norm; it has every kind of layer that a method may need."""
    return mlp(shape, classes, hidden=hidden, batch_norm=True)


def logistic(shape: ItemShape, classes: int) -> nn.Module:
    """Logistic regression: one linear layer."""
    return Flat(prod(shape), [], classes)


class TextNet(Dense):
    """Mean of word vectors, then dense layers; token 0 is padding and is ignored."""

    takes = torch.int64

    def __init__(self, classes: int, vocab: int, width: int, hidden: list[int], batch_norm: bool = False):
        super().__init__(width, hidden, classes)
        self.embedding = nn.Embedding(vocab, width, padding_idx=0)
        self.norm = nn.BatchNorm1d(width) if batch_norm else None

    def forward(self, x: Tensor) -> Tensor:
        real = (x != 0).unsqueeze(-1).to(self.embedding.weight.dtype)  # [batch, tokens, 1]
        mean = (self.embedding(x) * real).sum(1) / real.sum(1).clamp(min=1)
        return super().forward(mean if self.norm is None else self.norm(mean))


def text_net(
    shape: ItemShape,
    classes: int,
    *,
    vocab: Positive = 8192,
    width: Positive = 64,
    hidden: Widths = (64,),
    batch_norm: bool = False,
) -> nn.Module:
    """Word vectors, their mean, a small MLP; items are token numbers below `vocab`, 0 is padding."""
    _tokens("text", shape)
    return TextNet(classes, vocab, width, list(hidden), batch_norm)


def text_bn(
    shape: ItemShape, classes: int, *, vocab: Positive = 8192, width: Positive = 64, hidden: Widths = (64,)
) -> nn.Module:
    """Word vectors, their mean with batch norm, a small MLP; items are token numbers below `vocab`, 0 is padding."""
    return text_net(shape, classes, vocab=vocab, width=width, hidden=hidden, batch_norm=True)


class ItemVectors(nn.Embedding):
    """A vector for each item; its last entry is the item's bias."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)
        with torch.no_grad():
            self.weight[:, -1] = 0


class Taste(nn.Linear):
    """The vector and bias of a person; the weight of the item's bias, its last input, starts at 1."""

    start = 0.0

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)
        with torch.no_grad():
            self.weight[:, -1] = 1
            self.bias.fill_(self.start)


class RatingNet(nn.Module):
    """Matrix factorisation in which a client is a person; item vectors are the body, the person's vector the head."""

    takes = torch.int64

    def __init__(self, items: int, width: int, outputs: int, start: float):
        super().__init__()
        self.items = ItemVectors(items, width + 1)
        self.classifier = Taste(width + 1, outputs)
        self.classifier.start = start
        self.classifier.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.items(x[:, 0]))  # type: ignore[no-any-return]


def ratings(
    shape: ItemShape, classes: int, *, vocab: Positive = 8192, width: Positive = 8, start: float = 3.0
) -> nn.Module:
    """Matrix factorisation; an item is a number below `vocab`, a client is a person, `start` is the mean rating."""
    if shape != (1,):
        raise CoterieError(
            f"the model ratings takes one item number each; the data's items have shape {shape_text(shape)}"
        )
    return RatingNet(vocab, width, classes, start)


def signal(shape: ItemShape, classes: int, *, batch_norm: bool = True, hidden: Widths = (64,)) -> nn.Module:
    """Three 1-D convolutions (32, 64, 64), mean over time, a small MLP; items are [channels, time]."""
    _signal("signal", shape)
    blocks = [Conv(out, 5, padding=2, batch_norm=batch_norm) for out in (32, 64, 64)]
    return ConvNet(shape, classes, blocks, list(hidden), to=(1,))


def resnet8(
    shape: ItemShape, classes: int, *, norm: NormKind = "batch", width: Positive = 16, stem: StemKind | None = None
) -> nn.Module:
    """ResNet-8 for small pictures: three stages of one block (16, 32, 64 channels)."""
    _picture("resnet8", shape, 4)
    return picture_resnet(shape, classes, (1, 1, 1), width, norm, stem)


def resnet18(
    shape: ItemShape, classes: int, *, norm: NormKind = "batch", width: Positive = 64, stem: StemKind | None = None
) -> nn.Module:
    """ResNet-18: four stages of two blocks (64 to 512 channels)."""
    _picture("resnet18", shape, 8)
    return picture_resnet(shape, classes, (2, 2, 2, 2), width, norm, stem)


def resnet20(
    shape: ItemShape, classes: int, *, norm: NormKind = "batch", width: Positive = 16, stem: StemKind | None = None
) -> nn.Module:
    """ResNet-20 for small pictures: three stages of three blocks (16, 32, 64 channels)."""
    _picture("resnet20", shape, 4)
    return picture_resnet(shape, classes, (3, 3, 3), width, norm, stem)


def resnet34(
    shape: ItemShape, classes: int, *, norm: NormKind = "batch", width: Positive = 64, stem: StemKind | None = None
) -> nn.Module:
    """ResNet-34: four stages of 3, 4, 6 and 3 blocks (64 to 512 channels)."""
    _picture("resnet34", shape, 8)
    return picture_resnet(shape, classes, (3, 4, 6, 3), width, norm, stem)


def mobilenetv2(
    shape: ItemShape,
    classes: int,
    *,
    norm: NormKind = "batch",
    width: Annotated[float, Field(gt=0, le=4)] = 1.0,
) -> nn.Module:
    """MobileNetV2: 17 inverted residual blocks; `width` multiplies all channels."""
    _picture("mobilenetv2", shape, 8)
    return MobileNetV2(shape, classes, width, norm)


class NormConvNet(nn.Module):
    """Blocks block1, block2, ... of convolution, norm, ReLU and mean-pool, then the classifier."""

    def __init__(self, shape: ItemShape, classes: int, depth: int, width: int, norm: NormKind):
        super().__init__()
        self._blocks = tuple(f"block{i + 1}" for i in range(depth))
        for i, name in enumerate(self._blocks):
            conv = nn.Conv2d(width if i else shape[0], width, 3, padding=1)
            self.add_module(name, nn.Sequential(conv, norm_layer(norm, width), nn.ReLU(), nn.AvgPool2d(2)))
        self.classifier = nn.Linear(width * (shape[1] >> depth) * (shape[2] >> depth), classes)

    def forward(self, x: Tensor) -> Tensor:
        for name in self._blocks:
            x = getattr(self, name)(x)
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]


def convnet(
    shape: ItemShape, classes: int, *, norm: NormKind = "group", width: Positive = 64, depth: Positive = 3
) -> nn.Module:
    """Plain convolutional net: `depth` blocks of a 3x3 convolution, norm, ReLU and mean-pool."""
    _picture("convnet", shape, 2**depth)
    return NormConvNet(shape, classes, depth, width, norm)


def vit(
    shape: ItemShape,
    classes: int,
    *,
    patch: Positive | None = None,
    width: Positive = 64,
    depth: Positive = 4,
    heads: Positive = 4,
    feedforward: Positive | None = None,
    dropout: Share = 0.0,
) -> nn.Module:
    """Small vision transformer; by default a picture has 7 or 8 patches on a side."""
    _picture("vit", shape, 2)
    patch = patch or max(1, min(shape[1:]) // 8 if min(shape[1:]) % 7 else min(shape[1:]) // 7)
    if shape[1] % patch or shape[2] % patch:
        raise CoterieError(
            f"the option patch = {patch} of the model vit does not divide pictures of {shape_text(shape)}"
        )
    _check_heads("vit", width, heads)
    return VisionTransformer(shape, classes, patch, width, depth, heads, feedforward or 4 * width, dropout)


def transformer(
    shape: ItemShape,
    classes: int,
    *,
    vocab: Positive = 8192,
    width: Positive = 64,
    depth: Positive = 2,
    heads: Positive = 4,
    feedforward: Positive | None = None,
    positions: Positive | None = None,
    dropout: Share = 0.0,
) -> nn.Module:
    """BERT-like transformer encoder for token numbers below `vocab`; 0 is padding, which is masked."""
    _tokens("transformer", shape)
    _check_heads("transformer", width, heads)
    if positions is not None and positions < shape[0]:
        raise CoterieError(f"the model transformer has positions = {positions}, and items have {shape[0]} tokens")
    return TextTransformer(
        classes, vocab, width, depth, heads, feedforward or 4 * width, positions or shape[0], dropout
    )


def minilm(shape: ItemShape, classes: int, *, depth: Positive = 6, dropout: Share = 0.0) -> nn.Module:
    """The transformer of MiniLM-L6 (384 wide, 6 layers, 30,522 tokens), whose weights a file gives."""
    _tokens("minilm", shape)
    if shape[0] > 512:
        raise CoterieError(f"the model minilm has 512 positions, and items have {shape[0]} tokens")
    return TextTransformer(classes, 30522, 384, depth, 12, 1536, 512, dropout)


def resnet1d(
    shape: ItemShape,
    classes: int,
    *,
    norm: NormKind = "batch",
    width: Positive = 32,
    stages: Positive = 3,
    blocks: Positive = 1,
) -> nn.Module:
    """ResNet for signals [channels, time]: stages of basic blocks with kernels of 5 steps."""
    _signal("resnet1d", shape)
    widths = [width * 2**i for i in range(stages)]
    return ResNet(shape, classes, widths, [blocks] * stages, norm, False, kernel=5)


def tcn(
    shape: ItemShape,
    classes: int,
    *,
    norm: NormKind = "group",
    width: Positive = 32,
    depth: Positive = 4,
    kernel: Positive = 3,
    dropout: Share = 0.0,
) -> nn.Module:
    """Temporal convolutional network for signals [channels, time]: causal convolutions with dilations 1, 2, 4, ..."""
    _signal("tcn", shape)
    return TCN(shape, classes, width, depth, kernel, norm, dropout)


def tabular_mlp(
    shape: ItemShape, classes: int, *, embedding: Annotated[int, Field(ge=0)] = 8, hidden: Widths = (128, 64)
) -> nn.Module:
    """MLP for rows of a table, with a vector for each feature."""
    return TabularMLP(prod(shape), classes, embedding, list(hidden))


def tabular_resnet(
    shape: ItemShape,
    classes: int,
    *,
    embedding: Annotated[int, Field(ge=0)] = 8,
    width: Positive = 64,
    depth: Positive = 2,
    norm: NormKind = "batch",
    dropout: Share = 0.0,
) -> nn.Module:
    """ResNet for rows of a table, with a vector for each feature."""
    return TabularResNet(prod(shape), classes, embedding, width, depth, norm, dropout)


def _check_heads(name: str, width: int, heads: int) -> None:
    if width % heads:
        raise CoterieError(f"the model {name} needs a width that its heads divide, and {width} / {heads} is not whole")


def _tokens(name: str, shape: ItemShape) -> None:
    """Raise CoterieError unless items are token numbers."""
    if len(shape) != 1:
        raise CoterieError(
            f"the model {name} takes items of token numbers [tokens]; the data's have shape {shape_text(shape)}"
        )


def _signal(name: str, shape: ItemShape) -> None:
    """Raise CoterieError unless items are signals [channels, time]."""
    if len(shape) != 2 or shape[1] < 8:
        raise CoterieError(
            f"the model {name} takes items [channels, time] with 8 or more steps; "
            f"the data's items have shape {shape_text(shape)}"
        )


def _picture(name: str, shape: ItemShape, side: int) -> None:
    """Raise CoterieError unless items are pictures [channels, height, width] of at least side x side."""
    if len(shape) != 3 or min(shape[1:]) < side:
        smallest = f" of {side}x{side} or more" if side > 1 else ""
        expected = f"the model {name} takes pictures [channels, height, width]{smallest}"
        raise CoterieError(f"{expected}; the data's items have shape {shape_text(shape)}")


ZOO: dict[str, Callable[..., nn.Module]] = {
    "convnet": convnet,
    "ecsfl-cnn": ecsfl_cnn,
    "fedgmh-cnn": fedgmh_cnn,
    "fedpc-cnn": fedpc_cnn,
    "lenet5": lenet5,
    "lenet5-2fc": lenet5_2fc,
    "lenet5-nobn": lenet5_nobn,
    "logistic": logistic,
    "minilm": minilm,
    "mlp": mlp,
    "mlp-bn": mlp_bn,
    "mobilenetv2": mobilenetv2,
    "ratings": ratings,
    "resnet1d": resnet1d,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet34": resnet34,
    "scfpfl-cnn": scfpfl_cnn,
    "signal": signal,
    "tabular-mlp": tabular_mlp,
    "tabular-resnet": tabular_resnet,
    "tcn": tcn,
    "text": text_net,
    "text-bn": text_bn,
    "transformer": transformer,
    "vgg11": vgg11,
    "vit": vit,
}
