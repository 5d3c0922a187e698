"""Averaging of models in the Fourier domain: common low-frequency amplitudes, own phases (SC-FPFL 3.2, PRR-FL)."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.errors import CoterieError, unknown

MatrixLayout = Literal["tile", "kernel_major", "prrfl"]
MaskKind = Literal["symmetric", "halfopen"]
Treatment = Literal["fourier", "mean", "keep"]

# axes (out, in, kernel rows, kernel columns) in the order in which they make up rows and columns of the matrix
_ORDER: dict[str, tuple[int, int, int, int]] = {
    "tile": (0, 2, 1, 3),  # (o, kernel row) x (c, kernel column): every kernel contiguous
    "kernel_major": (2, 0, 3, 1),
    "prrfl": (1, 2, 3, 0),  # (c, kernel row) x (kernel column, o)
}
SILENT = 1e-12  # a coefficient below this amplitude has no phase but rounding noise: it is given phase 0


def to_matrix(w: Tensor, layout: MatrixLayout = "tile") -> Tensor:
    """Return weights [k, out, in, *kernel] as matrices [k, rows, cols]; linear weights have a kernel of 1 x 1."""
    order = _order(layout)
    full = _four(w).permute(0, *(a + 1 for a in order))
    a, b, c, d = full.shape[1:]
    return full.reshape(len(w), a * b, c * d)


def from_matrix(m: Tensor, shape: torch.Size | tuple[int, ...], layout: MatrixLayout = "tile") -> Tensor:
    """Inverse of to_matrix for weights of `shape` [out, in, *kernel]."""
    order = _order(layout)
    sizes = _four(torch.empty(1, *shape, device="meta")).shape[1:]
    full = m.reshape(len(m), *(sizes[a] for a in order))
    back = [order.index(a) + 1 for a in range(4)]
    return full.permute(0, *back).reshape(len(m), *shape)


def frequencies(n: int) -> Tensor:
    """Signed integer frequencies of a DFT of length n, in its own order (fftfreq(n) * n without rounding errors)."""
    return (torch.arange(n) + n // 2) % n - n // 2


def low_mask(rows: int, cols: int, g: float, kind: MaskKind = "symmetric") -> Tensor:
    """Return the boolean mask [rows, cols] of low frequencies, unshifted, SC-FPFL's equation (15).

    symmetric: |freq| <= floor(g * size) on both axes, Hermitian, so that the inverse is real. halfopen: the slice
    centre - floor(g * size) .. centre + floor(g * size) of the shifted spectrum without its upper end (PRR-FL).
    """
    if not 0 <= g <= 0.5:
        raise CoterieError(f"g must lie in [0, 0.5], got {g}.")
    sides = []
    for size in (rows, cols):
        f, half = frequencies(size), math.floor(g * size + 1e-9)
        if kind == "symmetric":
            sides.append(f.abs() <= half)
        elif kind == "halfopen":
            sides.append((f >= -half) & (f < half))
        else:
            raise unknown("fourier.mask", kind, ("symmetric", "halfopen"))
    return sides[0][:, None] & sides[1][None, :]


def average_amplitudes(matrices: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return complex inverse transforms [k, rows, cols] after averaging the amplitudes of k matrices inside the mask.

    SC-FPFL's equations (13), (14), (16) and (17).
    """
    f = torch.fft.fft2(matrices.double())
    amplitude = f.abs()
    share = _shares(weights, len(f)).to(f.device)
    common = torch.einsum("k,krc->rc", share, amplitude)
    loud = amplitude >= SILENT
    phase = torch.where(loud, f / torch.where(loud, amplitude, 1.0), torch.ones((), dtype=f.dtype))
    inverse: Tensor = torch.fft.ifft2(torch.where(mask, common, amplitude) * phase)
    return inverse


def fourier_mean(
    w: Tensor,
    g: float,
    mask: MaskKind = "symmetric",
    layout: MatrixLayout = "tile",
    weights: Tensor | None = None,
) -> Tensor:
    """Weights [k, out, in, *kernel] with common low amplitudes and their own phases; one alone is unchanged."""
    if len(w) == 1:
        return w.clone()
    flat = w[:, None, :] if w.ndim == 2 else w  # a vector (bias) is a matrix of one row
    m = to_matrix(flat, layout)
    out = average_amplitudes(m, low_mask(m.shape[1], m.shape[2], g, mask).to(w.device), weights).real
    return from_matrix(out, flat.shape[1:], layout).reshape(w.shape).to(w.dtype)


def fourier_aggregate(
    stacked: Mapping[str, Tensor],
    treatment: Callable[[str], Treatment],
    g: float = 0.35,
    mask: MaskKind = "symmetric",
    layout: MatrixLayout = "tile",
    weights: Tensor | None = None,
) -> Tree:
    """A stacked tree of k edge models, each entry by its treatment; one edge alone is unchanged."""
    out: Tree = {}
    for name, v in stacked.items():
        how = treatment(name)
        if how == "keep" or len(v) == 1:
            out[name] = v.clone()
        elif how == "mean":
            mean = torch.tensordot(_shares(weights, len(v)).to(v.device), v.double(), 1)
            out[name] = mean.to(v.dtype).expand_as(v).clone()
        elif how == "fourier":
            out[name] = fourier_mean(v, g, mask, layout, weights)
        else:
            raise unknown("fourier treatment", how, ("fourier", "mean", "keep"))
    return out


def prrfl_window(round: int, rounds: int, start: float = 0.7, end: float = 0.95) -> float:
    """Return the relative size r of PRR-FL's window, which grows linearly; a half-open mask has g = r / 2."""
    return start + round / rounds * (end - start)


def _order(layout: str) -> tuple[int, int, int, int]:
    if layout not in _ORDER:
        raise unknown("fourier.layout", layout, _ORDER)
    return _ORDER[layout]


def _four(w: Tensor) -> Tensor:
    """[k, out, in, kernel rows, kernel columns] of any weight with at least two axes."""
    k, out, inner, *kernel = w.shape
    rows = kernel[0] if kernel else 1
    return w.reshape(k, out, inner, rows, math.prod(kernel[1:]))


def _shares(weights: Tensor | None, n: int) -> Tensor:
    if weights is None:
        return torch.full((n,), 1 / n, dtype=torch.float64)
    return weights.double() / weights.double().sum()
