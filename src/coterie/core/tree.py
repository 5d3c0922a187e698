"""Arithmetic on trees: flat dictionaries of tensors keyed by state-dict names.

A tree may hold more than one model. The entries of a further model carry a tag in front of their names (`p:fc.weight`);
`x:` marks single entries that belong to no model.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

Tree = dict[str, Tensor]
Predicate = Callable[[str], bool]  # predicate on names
MARK = ":"  # ends a tag


def everything(name: str) -> bool:
    """True for every name."""
    return True


def nothing(name: str) -> bool:
    """False for every name."""
    return False


def keep(tree: Mapping[str, Tensor], names: Predicate) -> Tree:
    """Return the entries whose names fulfil the predicate."""
    return {k: v for k, v in tree.items() if names(k)}


def drop(tree: Mapping[str, Tensor], names: Predicate) -> Tree:
    """Return the entries whose names do not fulfil the predicate."""
    return {k: v for k, v in tree.items() if not names(k)}


def clone(tree: Mapping[str, Tensor]) -> Tree:
    """Return detached copies of all entries."""
    return {k: v.detach().clone() for k, v in tree.items()}


# ---- tags ------------------------------------------------------------------------------------------------------------
def tag(mark: str, tree: Mapping[str, Tensor]) -> Tree:
    """Put a tag in front of every name, so that several models fit into one tree."""
    return {f"{mark}{MARK}{k}": v for k, v in tree.items()}


def tagged(mark: str, tree: Mapping[str, Tensor]) -> Tree:
    """Return the entries with this tag, under their plain names; the tensors are the same objects."""
    n = len(mark) + len(MARK)
    return {k[n:]: v for k, v in tree.items() if k.startswith(mark + MARK)}


def untagged(tree: Mapping[str, Tensor]) -> Tree:
    """Return the entries without a tag: those of the model itself."""
    return {k: v for k, v in tree.items() if MARK not in k}


def is_tagged(mark: str, name: str) -> bool:
    """True for a name with this tag."""
    return name.startswith(mark + MARK)


def has_tag(mark: str) -> Predicate:
    """Return the predicate that is true for names with this tag."""
    return partial(is_tagged, mark)


def plain(name: str) -> str:
    """Return a name without its tags."""
    return name.rsplit(MARK, 1)[-1]


# ---- arithmetic ------------------------------------------------------------------------------------------------------
def floats(tree: Mapping[str, Tensor]) -> Tree:
    """Return the floating-point entries."""
    return {k: v for k, v in tree.items() if v.is_floating_point()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> Tree:
    """Return a + scale * b over the names of a."""
    return {k: torch.add(v, b[k], alpha=scale) for k, v in a.items()}


def sub(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """Return a - b over the names of a."""
    return {k: v - b[k] for k, v in a.items()}


def scaled(a: Mapping[str, Tensor], factor: float | Tensor) -> Tree:
    """Return factor * a."""
    return {k: v * factor for k, v in a.items()}


def mean(trees: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | Tensor | None = None) -> Tree:
    """Weighted mean, summed in the given order; weights are normalised. The mean of one tree has the same values."""
    share = normalised(weights, len(trees))
    names = list(trees[0])
    if not names:
        return {}  # the method shares nothing
    total = torch._foreach_mul([trees[0][k] for k in names], share[0])
    for tree, part in zip(trees[1:], share[1:], strict=True):
        torch._foreach_add_(total, [tree[k] for k in names], alpha=part)
    return dict(zip(names, total, strict=True))


def normalised(weights: Sequence[float] | Tensor | None, n: int) -> list[float]:
    """Return n weights that sum to one; None means uniform. Raise ValueError for negative weights or a sum of 0."""
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
    """One vector [P] of the entries `names`, in this order; by default all floating entries, sorted by name."""
    picked = list(names) if names is not None else sorted(k for k, v in tree.items() if v.is_floating_point())
    return torch.cat([tree[k].reshape(-1) for k in picked]) if picked else torch.zeros(0)


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Tree:
    """Inverse of flatten for the floating entries of `like`, in the order of `like`."""
    parts: Tree = {}
    at = 0
    for k in sorted(k for k, v in like.items() if v.is_floating_point()):
        parts[k] = vector[at : at + like[k].numel()].reshape(like[k].shape)
        at += like[k].numel()
    return {k: parts[k] for k in like if k in parts}


def stack(trees: Sequence[Mapping[str, Tensor]]) -> Tree:
    """Stacked tree with a leading axis [len(trees), ...]."""
    return {k: torch.stack([t[k] for t in trees]) for k in trees[0]}


def row(stacked: Mapping[str, Tensor], i: int) -> Tree:
    """Row i of a stacked tree, as clones."""
    return {k: v[i].clone() for k, v in stacked.items()}


def nbytes(tree: Mapping[str, Tensor]) -> int:
    """Bytes of a payload."""
    return sum(value_bytes(v.numel(), v.dtype) for v in tree.values())


def value_bytes(count: int, dtype: torch.dtype) -> int:
    """Bytes of `count` values in a payload or a file; booleans are stored as bits."""
    return (count + 7) // 8 if dtype == torch.bool else count * dtype.itemsize


def finite(tree: Mapping[str, Tensor]) -> bool:
    """True if no floating entry is NaN or infinite. The sum tells, unless it overflows; then all values are checked."""
    return all(
        math.isfinite(v.sum().item()) or bool(torch.isfinite(v).all()) for v in tree.values() if v.is_floating_point()
    )
