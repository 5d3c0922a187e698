"""Gradients for methods with an update rule of their own."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from coterie.core.tree import Tree

G = TypeVar("G", Tensor, Tensor | None)


def grad(loss: Callable[[Tree], Tensor], params: Tree, names: Iterable[str]) -> Tree:
    """Gradient of `loss` at `params` by the entries `names`; entries the loss does not touch get zeros.

    Batch norm among `names` is in training mode: it uses batch statistics and updates the running ones in `params` in
    place. Pass clones of those (`still`) if they must not change.
    """
    leaves = {k: params[k].detach().requires_grad_() for k in names}
    with torch.enable_grad():
        value = loss({**params, **leaves})
    got = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(leaves.items(), got, strict=True)}


def clipped(gradients: Sequence[G], largest: float) -> list[G]:
    """Scale gradients so that their common norm is at most `largest`; None stands for an entry without gradient."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([g for g in gradients if g is not None])))
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    return [g if g is None else g * factor for g in gradients]


def still(params: Tree, names: Iterable[str]) -> Tree:
    """Return the tree with clones of these entries (batch-norm statistics), which a forward pass may change."""
    return {**params, **{k: params[k].clone() for k in names}}
