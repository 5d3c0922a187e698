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
from coterie.models.blocks import Conv, ConvNet, Dense, ItemShape, shape_text
from coterie.models.vgg import VGG11

Positive = Annotated[int, Field(ge=1)]


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
    if len(shape) != 1:
        raise CoterieError(
            f"the model text takes items of token numbers [tokens]; the data's have shape {shape_text(shape)}"
        )
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
    if len(shape) != 2 or shape[1] < 8:
        raise CoterieError(
            "the model signal takes items [channels, time] with 8 or more steps; "
            f"the data's items have shape {shape_text(shape)}"
        )
    blocks = [Conv(out, 5, padding=2, batch_norm=batch_norm) for out in (32, 64, 64)]
    return ConvNet(shape, classes, blocks, list(hidden), to=(1,))


def _picture(name: str, shape: ItemShape, side: int) -> None:
    """Raise CoterieError unless items are pictures [channels, height, width] of at least side x side."""
    if len(shape) != 3 or min(shape[1:]) < side:
        smallest = f" of {side}x{side} or more" if side > 1 else ""
        expected = f"the model {name} takes pictures [channels, height, width]{smallest}"
        raise CoterieError(f"{expected}; the data's items have shape {shape_text(shape)}")


ZOO: dict[str, Callable[..., nn.Module]] = {
    "ecsfl-cnn": ecsfl_cnn,
    "fedgmh-cnn": fedgmh_cnn,
    "fedpc-cnn": fedpc_cnn,
    "lenet5": lenet5,
    "lenet5-2fc": lenet5_2fc,
    "lenet5-nobn": lenet5_nobn,
    "logistic": logistic,
    "mlp": mlp,
    "mlp-bn": mlp_bn,
    "ratings": ratings,
    "scfpfl-cnn": scfpfl_cnn,
    "signal": signal,
    "text": text_net,
    "text-bn": text_bn,
    "vgg11": vgg11,
}
