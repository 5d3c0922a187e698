"""Arithmetic on trees: flat dictionaries of tensors keyed by state-dict names."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]
Names = Callable[[str], bool]


def everything(name: str) -> bool:
    return True


def nothing(name: str) -> bool:
    return False


def keep(tree: Mapping[str, Tensor], names: Names) -> Tree:
    return {k: v for k, v in tree.items() if names(k)}


def drop(tree: Mapping[str, Tensor], names: Names) -> Tree:
    return {k: v for k, v in tree.items() if not names(k)}


def clone(tree: Mapping[str, Tensor]) -> Tree:
    return {k: v.detach().clone() for k, v in tree.items()}


def prefix(mark: str, tree: Mapping[str, Tensor]) -> Tree:
    """Put `mark` before every name, so that two models fit into one tree."""
    return {mark + k: v for k, v in tree.items()}


def strip(mark: str, tree: Mapping[str, Tensor]) -> Tree:
    """The part of the tree marked by `mark`, under its plain names; the tensors are the same objects."""
    n = len(mark)
    return {k[n:]: v for k, v in tree.items() if k.startswith(mark)}


def floats(tree: Mapping[str, Tensor]) -> Tree:
    return {k: v for k, v in tree.items() if v.is_floating_point()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> Tree:
    """A + scale * b over the names of a."""
    return {k: torch.add(v, b[k], alpha=scale) for k, v in a.items()}


def sub(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """A - b over the names of a."""
    return {k: v - b[k] for k, v in a.items()}


def scaled(a: Mapping[str, Tensor], factor: float | Tensor) -> Tree:
    return {k: v * factor for k, v in a.items()}


def mean(trees: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | Tensor | None = None) -> Tree:
    """Weighted mean in the order given (weights are normalised here); one tree in, the same values out."""
    share = normalised(weights, len(trees))
    names = list(trees[0])
    if not names:
        return {}  # a method that shares nothing
    total = torch._foreach_mul([trees[0][k] for k in names], share[0])
    for tree, part in zip(trees[1:], share[1:], strict=True):
        torch._foreach_add_(total, [tree[k] for k in names], alpha=part)
    return dict(zip(names, total, strict=True))


def normalised(weights: Sequence[float] | Tensor | None, n: int) -> list[float]:
    """Non-negative weights that sum to one; None means uniform."""
    if n == 0:
        raise ValueError("the mean of no trees is undefined")
    if weights is None:
        return [1.0 / n] * n
    values = [float(w) for w in weights]
    total = sum(values)
    if len(values) != n or min(values) < 0 or not total > 0:
        raise ValueError(f"need {n} non-negative weights with a positive sum, got {values}")
    return [w / total for w in values]


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Inner product over the entries of `a`; differentiable in both."""
    return flatten(a, a).dot(flatten(b, a))


def sqdist(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Squared Euclidean distance over `names`; differentiable in both."""
    picked = list(names)
    gap = flatten(a, picked) - flatten(b, picked)  # one vector: entry by entry takes twice as long in a small model
    return gap.dot(gap)


def flatten(tree: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Tensor:
    """One vector [P] of the floating entries, in the order of `names` (default: sorted, whatever the tree's order)."""
    picked = list(names) if names is not None else sorted(k for k, v in tree.items() if v.is_floating_point())
    return torch.cat([tree[k].reshape(-1) for k in picked]) if picked else torch.zeros(0)


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Tree:
    """Inverse of flatten for the floating entries of `like`, in the order of `like`."""
    found: Tree = {}
    at = 0
    for k in sorted(k for k, v in like.items() if v.is_floating_point()):
        found[k] = vector[at : at + like[k].numel()].reshape(like[k].shape)
        at += like[k].numel()
    return {k: found[k] for k in like if k in found}


def stack(trees: Sequence[Mapping[str, Tensor]]) -> Tree:
    """Stacked tree with a leading axis [len(trees), ...]."""
    return {k: torch.stack([t[k] for t in trees]) for k in trees[0]}


def row(stacked: Mapping[str, Tensor], i: int) -> Tree:
    """Row i of a stacked tree, as clones."""
    return {k: v[i].clone() for k, v in stacked.items()}


def nbytes(tree: Mapping[str, Tensor]) -> int:
    """What the payload weighs on the wire: dtype sizes, booleans one bit each."""
    total = 0
    for v in tree.values():
        total += (v.numel() + 7) // 8 if v.dtype == torch.bool else v.numel() * v.element_size()
    return total


def finite(tree: Mapping[str, Tensor]) -> bool:
    """Are all floating entries numbers? One that is not spoils its sum; a sum that merely overflows is looked into."""
    return all(
        math.isfinite(v.sum().item()) or bool(torch.isfinite(v).all()) for v in tree.values() if v.is_floating_point()
    )
