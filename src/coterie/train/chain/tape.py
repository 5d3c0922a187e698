"""Find out whether a model is a chain of known layers by observing passes, not by names or classes."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from coterie.core.net import Net
from coterie.core.tree import Tree
from coterie.train.native.op import EVAL, KERNELS, MOST_FLOATS, MOST_PADDING, MOST_WEIGHTS, PLAIN, TRAIN

BLOCK, CONV, NORM, GROUP, RELU, MAX_POOL, MEAN_POOL, LINEAR = range(8)  # kinds of layers.c

PictureShape = tuple[int, int, int]  # channels, height, width


class NoChainError(Exception):
    """The model is not a chain of known layers; the message says why in a few words."""


@dataclass(frozen=True)
class ChainLayer:
    """A layer of the chain: shapes of an item before and after, and the tensors that it uses, by role."""

    kind: int
    before: PictureShape
    after: PictureShape
    tensors: Mapping[str, str]  # weight, bias, gamma, beta, mean, var -> name of the entry
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    mode: int = PLAIN
    eps: float = 0.0
    momentum: float = 0.0


def chain_of(net: Net, tree: Tree, example: Tensor) -> tuple[ChainLayer, ...]:
    """Return the layers of the model in the net's present mode; raise NoChainError if they are not a known chain.

    `tree` is changed by batch norm in training mode. The model runs twice, with three and with two items.
    """
    if any(_watched(m) for m in net.module.modules()):
        raise NoChainError("one of its modules has hooks")
    first, second = (_observed(net, tree, example[:n]) for n in (3, 2))
    if first != second:
        raise NoChainError("its layers depend on the number of items")
    return fused(first)


def _watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _observed(net: Net, tree: Tree, x: Tensor) -> tuple[ChainLayer, ...]:
    frozen = {**dict(net.module.named_parameters()), **dict(net.module.named_buffers())}
    names = {id(v): k for k, v in frozen.items() if k in net.layout.frozen}
    names |= {id(v): k for k, v in tree.items()}
    tape = _Tape(x, names)
    with torch.no_grad(), tape:
        result = net.forward(tree, x)
    if result is not tape.now or result.ndim != 2:
        raise NoChainError("its output is not that of its last layer")
    if not tape.links:
        raise NoChainError("it has no layers")
    return tuple(tape.links)


class _Tape(TorchFunctionMode):
    """Notes the layers that run, each of which must take the output of the one before."""

    def __init__(self, x: Tensor, names: Mapping[int, str]):
        super().__init__()
        self.now, self.names = x, names
        self.links: list[ChainLayer] = []
        self._used: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _QUESTIONS or not any(isinstance(v, Tensor) for v in tree_leaves((args, kwargs))):
            return out
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NoChainError(f"it uses {_said(func)}")
        bound = _bound(func, args, kwargs)
        if bound[0] is not self.now or not isinstance(out, Tensor):
            raise NoChainError(f"{_said(func)} does not take the output of the layer before")
        handler(self, out, *bound[1:])
        self.now = out
        return out

    def add(self, kind: int, out: Tensor, tensors: Mapping[str, Tensor | None], **more: Any) -> None:
        named = {}
        for role, t in tensors.items():
            if t is None:
                continue
            name = self.names.get(id(t))
            if name is None:
                raise NoChainError("a layer's weights are computed from others")
            if name in self._used:
                raise NoChainError(f"{name} is used twice")
            self._used.add(name)
            named[role] = name
        self.links.append(ChainLayer(kind, shape_of(self.now), shape_of(out), named, **more))


def shape_of(x: Tensor) -> PictureShape:
    if not 2 <= x.ndim <= 4:
        raise NoChainError(f"a layer's items have {x.ndim - 1} axes")
    channels, *sides = x.shape[1:]
    return (int(channels), *(1,) * (2 - len(sides)), *map(int, sides))  # type: ignore[return-value]


def _said(func: Any) -> str:
    return (
        str(resolve_name(func) or getattr(func, "__name__", func)).removeprefix("torch.").removeprefix("nn.functional.")
    )


def _two(value: Any, dims: int = 2) -> tuple[int, int]:
    """Return a size for height and width; signals have the height 1."""
    given = tuple(value) if isinstance(value, Iterable) else (value,) * dims
    if len(given) == 1:
        given *= dims
    return (1, int(given[0])) if dims == 1 else (int(given[0]), int(given[1]))


# ---- layers ----------------------------------------------------------------------------------------------------------
def _conv(dims: int) -> Callable[..., None]:
    def handler(
        tape: _Tape, out: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        if isinstance(padding, str):
            if padding != "valid":
                raise NoChainError(f"a convolution pads by {padding!r}")
            padding = 0
        kernel = (int(weight.shape[2]), int(weight.shape[3])) if dims == 2 else (1, int(weight.shape[2]))
        if tape.now.ndim != dims + 2:
            raise NoChainError("a convolution without a batch")
        pad = _two(padding, dims) if dims == 2 else (0, _two(padding, dims)[1])
        tape.add(
            CONV, out, {"weight": weight, "bias": bias}, kernel=kernel, stride=_two(stride, dims), padding=pad,
            dilation=_two(dilation, dims), groups=int(groups),
        )  # fmt: skip

    return handler


def _linear(tape: _Tape, out: Tensor, weight: Tensor, bias: Any = None) -> None:
    if tape.now.ndim != 2:
        raise NoChainError("a linear layer works on an axis of larger items")
    tape.add(LINEAR, out, {"weight": weight, "bias": bias})


def _batch_norm(
    tape: _Tape, out: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> None:  # fmt: skip
    tensors = {"gamma": weight, "beta": bias, "mean": running_mean, "var": running_var}
    tape.add(NORM, out, tensors, mode=TRAIN if training else EVAL, eps=eps, momentum=momentum)


def _group_norm(
    tape: _Tape, out: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> None:
    tape.add(GROUP, out, {"gamma": weight, "beta": bias}, groups=num_groups, eps=eps)


def _relu(tape: _Tape, out: Tensor, inplace: bool = False) -> None:
    tape.add(RELU, out, {})


def _max_pool(dims: int) -> Callable[..., None]:
    def handler(
        tape: _Tape, out: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> None:  # fmt: skip
        if ceil_mode or return_indices or _two(dilation, dims) != (1, 1):
            raise NoChainError("a max-pool with ceil_mode, indices or dilation")
        _pool(tape, out, MAX_POOL, dims, kernel_size, stride, padding, 0)

    return handler


def _mean_pool(dims: int) -> Callable[..., None]:
    def handler(
        tape: _Tape, out: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: Any = None,
    ) -> None:  # fmt: skip
        if ceil_mode or divisor_override is not None:
            raise NoChainError("a mean pool with ceil_mode or a divisor of its own")
        _pool(tape, out, MEAN_POOL, dims, kernel_size, stride, padding, int(count_include_pad))

    return handler


def _pool(tape: _Tape, out: Tensor, kind: int, dims: int, kernel: Any, stride: Any, padding: Any, mode: int) -> None:
    if tape.now.ndim != dims + 2:
        raise NoChainError("a pool without a batch")
    stride = kernel if stride is None or stride == [] or stride == () else stride
    pad = _two(padding, dims) if dims == 2 else (0, _two(padding, dims)[1])
    tape.add(kind, out, {}, kernel=_two(kernel, dims), stride=_two(stride, dims), padding=pad, mode=mode)


def _adaptive(tape: _Tape, out: Tensor, output_size: Any) -> None:
    tape.add(MEAN_POOL, out, {}, mode=2)


def _mean(tape: _Tape, out: Tensor, dim: Any = None, keepdim: bool = False, **more: Any) -> None:
    axes = {d % tape.now.ndim for d in ((dim,) if isinstance(dim, int) else dim or ())}
    if axes != set(range(2, tape.now.ndim)) or any(v is not None for v in more.values()):
        raise NoChainError("a mean over other axes than those of the picture")
    before = shape_of(tape.now)
    tape.links.append(ChainLayer(MEAN_POOL, before, (before[0], 1, 1), {}, mode=2))


def _reshape(tape: _Tape, out: Tensor, *sizes: Any, **more: Any) -> None:
    whole = tape.now.is_contiguous() and out.is_contiguous() and tape.now.dtype == out.dtype
    if not whole or len(out) != len(tape.now) or out.numel() != tape.now.numel():
        raise NoChainError("a change of shape that moves numbers")


def _dropout(tape: _Tape, out: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    if training and p > 0:
        raise NoChainError("it draws random numbers (dropout)")


def _unchanged(tape: _Tape, out: Tensor, *args: Any, **more: Any) -> None:
    if out is not tape.now:
        raise NoChainError("a conversion")


_HANDLERS: dict[Any, Callable[..., None]] = {
    F.linear: _linear, F.conv1d: _conv(1), F.conv2d: _conv(2), F.batch_norm: _batch_norm, F.group_norm: _group_norm,
    F.relu: _relu, F.relu_: _relu, torch.relu: _relu, torch.relu_: _relu, Tensor.relu: _relu, Tensor.relu_: _relu,
    torch.max_pool1d: _max_pool(1), torch.max_pool2d: _max_pool(2), F.max_pool1d: _max_pool(1),
    F.max_pool2d: _max_pool(2), F.avg_pool1d: _mean_pool(1), F.avg_pool2d: _mean_pool(2),
    F.adaptive_avg_pool1d: _adaptive, F.adaptive_avg_pool2d: _adaptive, torch.mean: _mean, Tensor.mean: _mean,
    torch.flatten: _reshape, Tensor.flatten: _reshape, Tensor.view: _reshape, Tensor.reshape: _reshape,
    torch.reshape: _reshape, Tensor.squeeze: _reshape, torch.squeeze: _reshape, Tensor.unsqueeze: _reshape,
    torch.unsqueeze: _reshape, Tensor.unflatten: _reshape, F.dropout: _dropout, F.dropout1d: _dropout,
    F.dropout2d: _dropout, Tensor.contiguous: _unchanged, Tensor.float: _unchanged, Tensor.to: _unchanged,
}  # fmt: skip

_QUESTIONS: set[Any] = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_contiguous, Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda")),
}  # fmt: skip


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments by position, as far as the handler names them in the order of the function."""
    handler = _HANDLERS[func]
    if not kwargs:
        return args
    given = dict(kwargs)
    first = (args[0],) if args else (given.pop("input", None),)
    if handler in (_reshape, _unchanged):
        return first
    try:
        bound = inspect.signature(handler).bind(None, None, *args[1:], **given)
    except TypeError:
        raise NoChainError(f"{_said(func)} has unusual arguments") from None
    bound.apply_defaults()
    return (*first, *bound.args[2:])


# ---- blocks ----------------------------------------------------------------------------------------------------------
def fused(links: tuple[ChainLayer, ...]) -> tuple[ChainLayer, ...]:
    """Join convolution, batch norm, ReLU and 2x2 max-pool to one block where the block's kernels know them."""
    out: list[ChainLayer] = []
    at = 0
    while at < len(links):
        first, rest = links[at], links[at + 1 : at + 4]
        norm = rest[0] if rest and rest[0].kind == NORM else None
        tail = rest[1:3] if norm else rest[:2]
        pool = next((link for link in tail if link.kind == MAX_POOL), None)
        if pool and {link.kind for link in tail} == {RELU, MAX_POOL} and _is_block(first, norm, pool):
            block = replace(first, kind=BLOCK, after=pool.after)
            if norm is not None:
                tensors = {**first.tensors, **norm.tensors}
                block = replace(block, tensors=tensors, mode=norm.mode, eps=norm.eps, momentum=norm.momentum)
            out.append(block)
            at += 3 + (norm is not None)
            continue
        if first.kind == CONV and prod_of(first) > MOST_WEIGHTS:
            raise NoChainError("one of its convolutions is so large that PyTorch is faster")
        out.append(first)
        at += 1
    return tuple(out)


def prod_of(conv: ChainLayer) -> int:
    """Return the number of weights of a convolution."""
    return conv.after[0] * conv.before[0] // conv.groups * conv.kernel[0] * conv.kernel[1]


def _is_block(conv: ChainLayer, norm: ChainLayer | None, pool: ChainLayer) -> bool:
    k, pad = conv.kernel[0], conv.padding[0]
    channels, height, width = conv.before
    plain = conv.stride == conv.dilation == (1, 1) and conv.groups == 1 and conv.padding == (pad, pad)
    return (
        conv.kind == CONV
        and plain
        and conv.kernel == (k, k)
        and k in KERNELS
        and pad <= MOST_PADDING
        and prod_of(conv) <= MOST_WEIGHTS
        and min(height, width) + 2 * pad - k + 1 >= 2
        and channels * (height + 4) * (width + 4) < MOST_FLOATS
        and (pool.kernel, pool.stride, pool.padding) == ((2, 2), (2, 2), (0, 0))
        and (norm is None or norm.mode == TRAIN or "mean" in norm.tensors)
    )
