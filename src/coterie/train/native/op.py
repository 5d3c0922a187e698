"""The native block as a differentiable operation, and the conditions of its use."""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from coterie.train.native.library import Call, Library, UnavailableError, open_library, wanted_instructions

PLAIN, EVAL, TRAIN = 0, 1, 2  # modes of block.c
KERNELS = (3, 5)
MOST_PADDING = 2
MOST_WEIGHTS = 2**18  # for more weights PyTorch is faster (512 x 512 channels: nearly twice)
MOST_FLOATS = 2**28  # offsets inside one image are 32-bit
TOLERANCE = 1e-4  # tolerance of the self-test, for float32 sums in a different order

Kernel = Callable[..., Tensor]


def pool(x: Tensor) -> Tensor:
    return F.relu(F.max_pool2d(x, 2))  # ReLU last: the same values and gradients on a quarter of the entries


def unfused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    padding: int,
) -> Tensor:
    """Return the block computed with PyTorch's own operations."""
    x = F.conv2d(x, weight, bias, padding=padding)
    if gamma is not None or beta is not None or running_mean is not None:
        x = F.batch_norm(x, running_mean, running_var, gamma, beta, training, momentum, eps)
    return pool(x)


def eligible(x: Tensor, weight: Tensor, vectors: Sequence[Tensor | None], training: bool, padding: int) -> bool:
    """True for plain float32 CPU tensors of a supported shape, outside vmap, grad transforms and compilers.

    `vectors` [channels] are bias, gamma, beta, running mean and running variance.
    """
    if peek_interpreter_stack() is not None or torch.compiler.is_compiling():
        return False
    if not (_plain_tensor(x) and _plain_tensor(weight) and _known_shape(x.shape, weight.shape, padding)):
        return False
    channels = weight.shape[0]
    for t in vectors:
        if t is not None and not (_plain_tensor(t) and t.numel() == channels):
            return False
    _, gamma, beta, running_mean, running_var = vectors
    if (running_mean is None) != (running_var is None):
        return False
    return training or running_mean is not None or (gamma is None and beta is None)


def _plain_tensor(t: Tensor) -> bool:
    kind = type(t)
    return (kind is Tensor or kind is nn.Parameter) and t.dtype is torch.float32 and t.is_cpu and not t.is_sparse


@lru_cache(maxsize=1024)
def _known_shape(x: torch.Size, weight: torch.Size, padding: int) -> bool:
    if len(x) != 4 or len(weight) != 4:
        return False
    (n, ic, h, w), (oc, wic, k, k2) = x, weight
    return (
        min(n, ic, oc) > 0
        and ic == wic
        and k == k2
        and k in KERNELS
        and 0 <= padding <= MOST_PADDING
        and min(h, w) + 2 * padding - k + 1 >= 2
        and ic * (h + 4) * (w + 4) < MOST_FLOATS
        and oc * ic * k * k <= MOST_WEIGHTS
    )


def load_kernel() -> tuple[Kernel | None, Library | None, str]:
    """Return the operation or None, the kernels that it uses, and one line that explains the choice."""
    try:
        library = open_library(wanted_instructions())
        kernel = block_kernel(library)
        if (error := self_test(kernel)) > TOLERANCE:
            raise UnavailableError(f"the self-test is off by {error:.1e}")
    except UnavailableError as e:
        return None, None, f"PyTorch's own operations, because {e}"
    return kernel, library, f"compiled C ({library.instructions})"


def self_test(kernel: Kernel) -> float:
    """Return the largest relative difference to PyTorch over values and gradients of a few small cases."""
    worst = 0.0
    draw = torch.Generator().manual_seed(7)
    with torch.inference_mode(False), torch.enable_grad():
        for ic, oc, k, pad, side in ((1, 6, 5, 0, 13), (6, 16, 5, 0, 12), (3, 20, 3, 1, 9)):
            for mode in (PLAIN, EVAL, TRAIN):
                shapes = [(3, ic, side, side), (oc, ic, k, k), (oc,)] + [(oc,)] * (0 if mode == PLAIN else 2)
                leaves = [torch.randn(s, generator=draw).requires_grad_() for s in shapes]
                results = []
                reference: Kernel = unfused
                for function in (kernel, reference):
                    stats: list[Tensor | None] = (
                        [None, None] if mode == PLAIN else [torch.full((oc,), 0.3), torch.full((oc,), 2.0)]
                    )
                    affine: Sequence[Tensor | None] = leaves[3:] or [None, None]
                    out = function(*leaves[:3], *affine, *stats, mode == TRAIN, 0.1, 1e-5, pad)
                    grads = torch.autograd.grad(out.square().sum(), leaves)
                    results.append([out.detach(), *grads, *(s for s in stats if s is not None)])
                for a, b in zip(*results, strict=True):
                    scale = float(b.abs().max()) + 1.0
                    difference = float((a - b).abs().max()) / scale
                    worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def block_kernel(lib: Library) -> Kernel:
    """Return the block as an operation that computes with these kernels."""

    @lru_cache(maxsize=256)
    def sizes(*dims: int) -> tuple[int, int, int]:
        out = (ctypes.c_int64 * 3)()
        lib.sizes(Call(*dims), out)
        return out[0], out[1], out[2]

    def forward(keep: bool, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Any]:
        """Return the result and the tensors that backward needs."""
        bias, gamma, beta, mean, var, training, momentum, eps, padding = rest
        n, ic, h, w = x.shape
        oc, k = weight.shape[0], weight.shape[2]
        oh, ow = h + 2 * padding - k + 1, w + 2 * padding - k + 1
        mode = PLAIN if gamma is None and beta is None and mean is None else TRAIN if training else EVAL
        dims = (n, ic, h, w, oc, k, padding, mode, int(keep))
        save_size, scratch_size, _ = sizes(*dims)
        x, weight = x.contiguous(), weight.contiguous()
        bias, gamma, beta = _dense(bias), _dense(gamma), _dense(beta)
        moved_mean, moved_var = _dense(mean), _dense(var)
        y = torch.empty((n, oc, oh // 2, ow // 2))
        save = torch.empty(save_size + scratch_size)
        lib.forward(
            Call(
                *dims,
                eps,
                momentum,
                x.data_ptr(),
                weight.data_ptr(),
                _pointer(bias),
                _pointer(gamma),
                _pointer(beta),
                _pointer(moved_mean),
                _pointer(moved_var),
                y.data_ptr(),
                save.data_ptr(),
                save.data_ptr() + 4 * save_size,
            )
        )
        if mode == TRAIN and mean is not None:
            pairs: Any = ((mean, moved_mean), (var, moved_var))
            for t, moved in pairs:
                if moved is not t:
                    t.copy_(moved)
                elif not t.is_inference():
                    torch.autograd.graph.increment_version(t)
        return y, (dims, eps, momentum, save)

    class ConvBlock(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
            y, ctx.made = forward(True, x, weight, *rest)
            ctx.save_for_backward(x, weight, *rest[:3])
            ctx.rest = rest[3:]
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            inputs = ctx.saved_tensors
            if torch.is_grad_enabled():  # second derivatives may be needed
                return (*_differentiable(inputs, ctx.rest, ctx.needs_input_grad, dy), *[None] * 6)
            dims, eps, momentum, save = ctx.made
            dy = dy.contiguous()
            fixed = [_dense(t) for t in inputs[1:]]
            needed = zip(inputs, ctx.needs_input_grad, strict=False)
            grads = [torch.empty(t.shape) if t is not None and need else None for t, need in needed]
            scratch = torch.empty(sizes(*dims)[2])
            lib.backward(
                Call(
                    *dims,
                    eps,
                    momentum,
                    None,
                    *map(_pointer, fixed),
                    *(None,) * 3,
                    save.data_ptr(),
                    scratch.data_ptr(),
                    dy.data_ptr(),
                    *map(_pointer, grads),
                )
            )
            return (*grads, *[None] * 6)

    def kernel(*args: Any) -> Tensor:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args[:5]):
            return ConvBlock.apply(*args)  # type: ignore[no-any-return,no-untyped-call]
        return forward(False, *args)[0]

    return kernel


def _differentiable(inputs: Any, rest: Any, needed: Any, dy: Tensor) -> list[Tensor | None]:
    """Return gradients computed with PyTorch's own operations, so that they are differentiable themselves."""
    stats = [None if t is None else t.detach().clone() for t in rest[:2]]  # forward has already updated the originals
    out = unfused(*inputs, *stats, *rest[2:])
    wanted = [i for i, t in enumerate(inputs) if t is not None and needed[i]]
    gradients = torch.autograd.grad(out, [inputs[i] for i in wanted], dy, create_graph=True)
    grads: list[Tensor | None] = [None] * len(inputs)
    for i, g in zip(wanted, gradients, strict=True):
        grads[i] = g
    return grads
