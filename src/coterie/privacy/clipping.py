"""Clipping of uploads: the change that a client uploads gets a bounded Euclidean norm."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.schema import Schema
from coterie.core.tree import Tree


def reference(schema: Schema, sent: Mapping[str, Tensor]) -> Tree:
    """Return the reference values from which the changes of an upload are computed.

    The reference of an entry of a model that was sent down is the sent value; that of any other entry is zero.
    """
    zero = {
        k: torch.zeros([n for n in e.shape if isinstance(n, int)], dtype=e.dtype) for k, e in schema.entries.items()
    }
    return {k: sent[k] if e.kind == "model" and k in sent else zero[k] for k, e in schema.entries.items()}


def norm_of(change: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm of all entries together, computed in double precision."""
    norms = [float(torch.linalg.vector_norm(v.detach(), dtype=torch.float64)) for v in change.values()]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64)))


def clipped_change(upload: Mapping[str, Tensor], at: Mapping[str, Tensor], clip: float) -> Tree:
    """Return the change of an upload from `at`, scaled down to the norm `clip` if it is longer."""
    change = T.sub(upload, at)
    norm = norm_of(change)
    return change if norm <= clip else T.scaled(change, clip / norm)


def clipped_upload(upload: Mapping[str, Tensor], at: Mapping[str, Tensor], clip: float) -> Tree:
    """Return the upload moved towards `at` until its change has at most the norm `clip`.

    An upload with NaN or infinity stays as it is: its receiver refuses it.
    """
    if not T.finite(upload):
        return dict(upload)
    return T.add(at, clipped_change(upload, at, clip))
