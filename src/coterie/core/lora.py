"""Layers with a low-rank adapter: y = W x + alpha / rank * B A x. Hu et al., ICLR 2022 (arXiv 2106.09685).

`adapt_layer` turns a linear layer, a convolution or attention into one with the parameters lora_A and lora_B. The layer
keeps its place, its names and its weights, which the caller freezes. B starts at zero, so the model's outputs are the
same at first. Networks with adapters of the package peft have the same groups of entries (layers.py).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_POINTWISE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}  # by dimensions


class LoRALayer(nn.Module):
    """The common part of all layers with an adapter."""

    lora_A: nn.Parameter  # noqa: N815, the usual name
    lora_B: nn.Parameter  # noqa: N815
    scale: float
    initial_rank: int
    # factor of each entry of A x [batch, rank], such as the shares of two stacked adapters; None: 1
    gate: Tensor | None = None
    gated: bool = True  # True if the layer can have such factors

    def through_gate(self, low: Tensor, axis: int) -> Tensor:
        """Return A x times the gate; `axis` is the one of the rank."""
        if self.gate is None:
            return low
        shape = [1] * low.dim()
        shape[0], shape[axis] = self.gate.shape
        return low * self.gate.reshape(shape)


class LoRALinear(LoRALayer, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        low = self.through_gate(F.linear(x, self.lora_A), -1)
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(low, self.lora_B)


class LoRAConv1d(LoRALayer, nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return _convolve(self, x)


class LoRAConv2d(LoRALayer, nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return _convolve(self, x)


def _convolve(layer: Any, x: Tensor) -> Tensor:
    """A is a convolution of the same kernel with `rank` channels, B one of 1x1."""
    low = layer.through_gate(layer._conv_forward(x, layer.lora_A, None), 1)
    more = _POINTWISE[layer.lora_B.dim() - 2](low, layer.lora_B)
    out: Tensor = layer._conv_forward(x, layer.weight, layer.bias) + layer.scale * more
    return out


class LoRAAttention(LoRALayer, nn.MultiheadAttention):
    """Attention whose common projection of queries, keys and values has an adapter."""

    gated = False  # PyTorch's function takes one weight for all items

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own, merged = self.in_proj_weight, self.in_proj_weight + self.scale * self.lora_B @ self.lora_A
        self._parameters["in_proj_weight"] = merged  # type: ignore[assignment]  # a tensor that depends on A and B
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters["in_proj_weight"] = own


_ADAPTED: dict[type[nn.Module], type[LoRALayer]] = {
    nn.Linear: LoRALinear, nn.Conv1d: LoRAConv1d, nn.Conv2d: LoRAConv2d, nn.MultiheadAttention: LoRAAttention,
}  # fmt: skip


def can_adapt(layer: nn.Module) -> bool:
    """True if `adapt_layer` takes this layer: an exact type, one group of channels, one projection in attention."""
    one_group = getattr(layer, "groups", 1) == 1
    return type(layer) in _ADAPTED and one_group and getattr(layer, "_qkv_same_embed_dim", True)


def adapt_layer(layer: Any, rank: int, scale: float, rng: torch.Generator) -> None:
    """Give a layer an adapter, in place; A is drawn as PyTorch draws weights, and B is zero."""
    assert can_adapt(layer)
    inner: tuple[int, ...]
    kernel: tuple[int, ...] = ()  # trailing dimensions of B
    if isinstance(layer, nn.MultiheadAttention):
        inner, out = (layer.embed_dim,), 3 * layer.embed_dim
    elif isinstance(layer, nn.Linear):
        inner, out = (layer.in_features,), layer.out_features
    else:
        inner, out = (layer.in_channels, *layer.kernel_size), layer.out_channels
        kernel = (1,) * len(layer.kernel_size)
    bound = 1 / math.sqrt(math.prod(inner))
    layer.__class__ = _ADAPTED[type(layer)]
    layer.scale, layer.initial_rank = scale, rank
    layer.lora_A = nn.Parameter((torch.rand(rank, *inner, generator=rng) * 2 - 1) * bound)
    layer.lora_B = nn.Parameter(torch.zeros(out, rank, *kernel))


def disable_fast_path(module: nn.Module) -> None:
    """Make PyTorch's transformer layers call their parts, because their shortcut reads weights past an adapter."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def lora_layers(module: nn.Module) -> list[LoRALayer]:
    """Return the layers of a module that have an adapter."""
    return [part for part in module.modules() if isinstance(part, LoRALayer)]
