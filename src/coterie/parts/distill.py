"""Losses between outputs of two models: distillation, balanced softmax, MMD; pure, so that vmap may carry them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def kl(teacher: Tensor, student: Tensor, weight: Tensor | None = None, detach: bool = True) -> Tensor:
    """KL(softmax(teacher) || softmax(student)) of logits [batch, classes], mean over the batch."""
    log_p = (teacher.detach() if detach else teacher).log_softmax(-1)
    log_q = student.log_softmax(-1)
    return batch_mean((log_p.exp() * (log_p - log_q)).sum(-1), weight)


def mutual_kl(a: Tensor, b: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return half of the KL divergence in both directions; both sides learn (CD2-pFed)."""
    return (kl(a, b, weight, detach=False) + kl(b, a, weight, detach=False)) / 2


def batch_mean(each: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean over [batch], weighted if there is padding."""
    return each.mean() if weight is None else (each * weight).sum() / weight.sum().clamp(min=1)


def balanced_logits(logits: Tensor, counts: Tensor, gamma: float = 1.0, floor: float = 1e-12) -> Tensor:
    """Logits + gamma * log counts [classes]: their cross-entropy is the balanced softmax (FedRoD)."""
    return logits + gamma * counts.to(logits.dtype).clamp(min=floor).log()


def mmd(
    x: Tensor, y: Tensor, widths: Sequence[float] = (10.0, 15.0, 20.0, 50.0), weight: Tensor | None = None
) -> Tensor:
    """Squared MMD of paired features [batch, d] under a sum of kernels exp(-d^2 / (2 width)) (FedCP)."""
    pairs = _kernel(x, x, widths) + _kernel(y, y, widths) - 2 * _kernel(x, y, widths)
    if weight is None:
        return pairs.mean()
    both = weight[:, None] * weight[None, :]
    return (pairs * both).sum() / both.sum().clamp(min=1)


def _kernel(a: Tensor, b: Tensor, widths: Sequence[float]) -> Tensor:
    square = (a.square().sum(1)[:, None] + b.square().sum(1)[None, :] - 2 * a @ b.T).clamp(min=0)
    return torch.stack([square * (-0.5 / width) for width in widths]).exp().sum(0)
