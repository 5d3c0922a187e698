"""Scores a model on a split: hits and counts per class, and the summed loss."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.method import Extras, Method, Split
from coterie.tree import Tree

CHUNK = 256  # pictures per forward pass: activations of small networks stay in cache


class Score(NamedTuple):
    hits: Tensor  # [classes] int64
    total: Tensor  # [classes] int64
    loss: Tensor  # [] summed cross-entropy


@torch.no_grad()
def score(method: Method, params: Tree, extras: Extras, split: Split, shared: bool = False) -> Score:
    """`shared`: the tree is the global model and is asked through predict_global."""
    classes = method.ctx.classes
    hits, loss = torch.zeros(classes, dtype=torch.int64), torch.zeros((), dtype=torch.float64)
    for a in range(0, len(split), CHUNK):
        x, y = split.x[a : a + CHUNK], split.y[a : a + CHUNK]
        logits = method.predict_global(params, x) if shared else method.predict(params, x, extras)
        hits += torch.bincount(y[logits.argmax(1) == y], minlength=classes)
        loss += F.cross_entropy(logits, y, reduction="sum").double()
    return Score(hits, torch.bincount(split.y, minlength=classes), loss)
