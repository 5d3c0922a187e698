"""Models of other packages: several inputs, a mask of padding, and outputs in an object or a dictionary.

A model of Coterie is called with one tensor and returns one tensor. `with_plain_interface` puts a module around a model
that is called differently: one with the argument `input_ids`, as those of Hugging Face, gets token numbers and a mask
that is 0 at padding; one with several arguments gets the parts of items [inputs, ...]. If the outputs are an object, a
dictionary or a tuple, the module returns the logits in it.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from coterie.models.blocks import ItemShape

_IDS, _MASK = "input_ids", "attention_mask"
_LOGITS = "logits"


class PlainInterface(nn.Module):
    """A model with another interface, called with one tensor; its layers are in `inner`."""

    def __init__(self, inner: nn.Module, names: Sequence[str], split: bool, padding: int = 0):
        super().__init__()
        self.inner, self.names, self.split, self.padding = inner, tuple(names), split, padding
        if _IDS in names:
            self.takes = torch.int64

    def forward(self, x: Tensor) -> Any:
        if self.split:
            given = {name: x[:, i] for i, name in enumerate(self.names)}
        elif _MASK in self.names:
            given = {_IDS: x, _MASK: (x != self.padding).long()}
        else:
            given = {self.names[0]: x}
        return logits_of(self.inner(**given))


def logits_of(out: Any) -> Any:
    """Return the logits of a model's output; an output without logits is returned unchanged, and refused later."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, Mapping) and _LOGITS in out:
        return out[_LOGITS]
    if isinstance(logits := getattr(out, _LOGITS, None), Tensor):
        return logits
    return out[0] if isinstance(out, tuple | list) and out and isinstance(out[0], Tensor) else out


def with_plain_interface(module: nn.Module, shape: ItemShape, dtype: torch.dtype | None) -> nn.Module:
    """Return a module that is called with one tensor: the given one, if it is already."""
    if type(module).__module__.startswith(("coterie.", "torch.nn.")):
        return module
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    names = [p.name for p in parameters]
    needed = [p.name for p in parameters if p.default is p.empty]
    if _IDS in names:
        padding = getattr(getattr(module, "config", None), "pad_token_id", 0) or 0
        order = [_IDS, *(n for n in names if n != _IDS and n in (_MASK, "token_type_ids"))]
        if len(shape) > 1:
            return PlainInterface(module, order[: shape[0]], split=True)
        return PlainInterface(module, [n for n in order if n in (_IDS, _MASK)], split=False, padding=padding)
    if len(needed) > 1 and len(shape) > 1 and shape[0] == len(needed):
        return PlainInterface(module, needed, split=True)
    if names and not isinstance(_tried(module, shape, dtype), Tensor):
        return PlainInterface(module, names[:1], split=False)
    return module


def _tried(module: nn.Module, shape: ItemShape, dtype: torch.dtype | None) -> Any:
    """Return the output for two items of zeros in evaluation mode; an empty tensor if the model does not take them."""
    was = module.training
    module.eval()
    kinds = [dtype or getattr(module, "takes", None)]
    try:
        for kind in kinds if kinds[0] is not None else (torch.float32, torch.int64):
            with torch.no_grad(), suppress(Exception):  # errors are reported when the model is tried again
                out = module(torch.zeros(2, *shape, dtype=kind))
                return out if isinstance(logits_of(out), Tensor) else torch.empty(0)
    finally:
        module.train(was)
    return torch.empty(0)
