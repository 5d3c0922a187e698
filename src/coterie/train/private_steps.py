"""Steps of DP-SGD: gradients of single samples are clipped, added up and noised.

Abadi et al., CCS 2016 (arXiv 1607.00133). Every sample is in a batch with probability `rate`, independently of all
others, so batches have different sizes and may be empty. The noised sum is divided by the expected size of a batch.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from coterie.core.context import Batch, Context, Extras
from coterie.core.method import Phase
from coterie.core.rng import torch_rng
from coterie.core.tree import Tree
from coterie.errors import CoterieError
from coterie.privacy.noise import noised

_VALUES = 2**24  # values of single gradients in memory at once


@dataclass(frozen=True)
class PrivateSteps:
    """The protection of one client's local training."""

    sigma: float
    clip: float
    secret: bool = False  # True: noise and batches come from the operating system, as in a real federation

    def picked(self, ctx: Context, n: int, keys: tuple[int, ...]) -> Tensor:
        """Return the samples of a batch."""
        rng = torch.Generator().manual_seed(secrets.randbits(63)) if self.secret else None
        rng = rng or torch_rng(ctx.seed, "dp batch", *keys)
        return (torch.rand(n, generator=rng) < sampling_rate(ctx, n)).nonzero()[:, 0]

    def gradient(
        self, ctx: Context, phase: Phase, params: Tree, names: Sequence[str], batch: Batch, extras: Extras,
        n: int, keys: tuple[int, ...],
    ) -> tuple[list[Tensor], Tensor]:  # fmt: skip
        """Return the noised mean gradient of a batch of a client with n samples, and the mean loss of its samples."""
        total = {k: torch.zeros_like(params[k]) for k in names}
        loss = total[names[0]].new_zeros(())
        if len(batch.y):
            total, loss = clipped_sum(phase, params, names, batch, extras, self.clip)
        text = (ctx.seed, "dp " + " ".join(map(str, keys)), 0, 0)
        total = noised(total, self.sigma * self.clip, None if self.secret else text)
        gradients = [total[k] / (sampling_rate(ctx, n) * n) for k in names]
        if phase.prior is not None:  # depends on no sample, so it needs neither clipping nor noise
            leaves = [params[k].detach().requires_grad_() for k in names]
            value = phase.prior({**params, **dict(zip(names, leaves, strict=True))}, extras)
            pulls = torch.autograd.grad(value, leaves, allow_unused=True)
            gradients = [g if p is None else g + p for g, p in zip(gradients, pulls, strict=True)]
            loss = loss + value.detach()
        return gradients, loss


def sampling_rate(ctx: Context, n: int) -> float:
    """Return the probability with which a sample of a client with n samples is in a batch."""
    return min(1.0, ctx.batch / max(1, n))


def clipped_sum(
    phase: Phase, params: Tree, names: Sequence[str], batch: Batch, extras: Extras, clip: float
) -> tuple[Tree, Tensor]:
    """Return the sum of the samples' gradients, each of at most the norm `clip`, and their mean loss."""
    objective = phase.loss
    assert objective is not None
    rest = {k: v.detach() for k, v in params.items() if k not in names}

    def of_one(trained: Tree, x: Tensor, y: Tensor) -> Tensor:
        value = objective({**rest, **trained}, Batch(x[None], y[None]), extras)
        if isinstance(value, tuple):
            raise CoterieError("dp = example(...) is not possible: the loss returns more than a number")
        return value

    trained = {k: params[k].detach() for k in names}
    each = max(1, _VALUES // max(1, sum(v.numel() for v in trained.values())))
    total = {k: torch.zeros_like(v) for k, v in trained.items()}
    loss = batch.x.new_zeros((), dtype=torch.float32)
    single = vmap(grad_and_value(of_one), in_dims=(None, 0, 0), randomness="different")
    for x, y in zip(torch.split(batch.x, each), torch.split(batch.y, each), strict=True):
        gradients, values = single(trained, x, y)
        flat = torch.cat([g.flatten(1) for g in gradients.values()], 1)
        norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
        scale = (clip / norms.clamp(min=clip)).to(flat.dtype)
        scale[~norms.isfinite()] = 0.0  # a sample whose gradient is not finite counts as none
        for k, g in gradients.items():
            total[k] += torch.einsum("i,i...->...", scale, g.nan_to_num(0.0, 0.0, 0.0))
        loss += values.sum() / len(batch.y)
    return total, loss.detach()
