"""Convolution + batch norm + ReLU + 2x2 max-pool as one native operation; PyTorch's own where that is not possible.

`conv_block` and `block` choose by themselves. COTERIE_NATIVE=0 or `enable(False)` switches the native code off.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from torch import Tensor, nn

from coterie.train.native import op
from coterie.train.native.library import Library
from coterie.train.native.op import eligible, unfused

__all__ = ["available", "block", "conv_block", "enable", "enabled", "native_status", "switched_off", "unfused"]

_lock = Lock()
_kernel: op.Kernel | None = None
_library: Library | None = None
_status: str | None = None  # None: not determined yet
_wanted: bool | None = None  # None: the environment decides


def enable(on: bool | None = True) -> None:
    """Switch the native code on or off in this process; None leaves it to COTERIE_NATIVE again."""
    global _wanted
    _wanted = on


@contextmanager
def switched_off() -> Iterator[None]:
    """Use only PyTorch's own operations inside the block, as exported files for other programs need."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before


def enabled() -> bool:
    """True if native code is switched on (it may still be unavailable)."""
    return _wanted if _wanted is not None else os.environ.get("COTERIE_NATIVE", "1").lower() not in ("0", "off", "no")


def available() -> bool:
    """True if native code works on this machine; the first call loads it and checks it against PyTorch."""
    return _load() is not None


def native_status() -> str:
    """Return one line that says which code computes models."""
    if not enabled():
        return "native code: switched off"
    _load()
    return f"native code: {_status}"


def kernels() -> Library | None:
    """Return the kernels if native code is switched on and available."""
    if not enabled():
        return None
    _load()
    return _library


def conv_block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    padding: int = 0,
) -> Tensor:
    """Return relu(max_pool2d(batch_norm(conv2d(x, weight, bias)), 2)).

    Batch norm is omitted if neither gamma nor statistics are given. Running statistics are updated in place in training
    mode, as in F.batch_norm.
    """
    args = (x, weight, bias, gamma, beta, running_mean, running_var, training, momentum, eps, padding)
    if enabled() and eligible(x, weight, args[2:7], training, padding) and (kernel := _kernel or _load()) is not None:
        return kernel(*args)
    return unfused(*args)


def block(conv: nn.Conv2d, bn: nn.BatchNorm2d | None, x: Tensor) -> Tensor:
    """Apply conv_block to modules; modules with hooks, or with features that the operation lacks, are called."""
    if not _simple(conv, bn):
        x = conv(x)
        return op.pool(x if bn is None else bn(x))
    padding = int(conv.padding[0])
    if bn is None:
        return conv_block(x, conv.weight, conv.bias, padding=padding)
    if bn.training and bn.num_batches_tracked is not None:
        bn.num_batches_tracked.add_(1)
    norm = (bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.training or bn.running_mean is None)
    return conv_block(x, conv.weight, conv.bias, *norm, bn.momentum or 0.0, bn.eps, padding)


def _simple(conv: nn.Conv2d, bn: nn.BatchNorm2d | None) -> bool:
    if type(conv) is not nn.Conv2d or _watched(conv):
        return False
    if not (conv.stride == conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"):
        return False
    if isinstance(conv.padding, str) or conv.padding[0] != conv.padding[1]:
        return False
    return bn is None or (type(bn) is nn.BatchNorm2d and bn.momentum is not None and not _watched(bn))


def _watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _load() -> op.Kernel | None:
    global _kernel, _library, _status
    if _status is not None:
        return _kernel
    with _lock:
        if _status is None:
            _kernel, _library, _status = op.load_kernel()
            if _kernel is None:
                logging.getLogger("coterie").warning("native code: %s", _status)
    return _kernel
