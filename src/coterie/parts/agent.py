"""An agent and the client's own model in one tree, and what a model says about a set of items."""

from typing import Literal

import torch
from torch import Tensor

from coterie.method import Context, Split
from coterie.tree import Tree

OWN = "own:"  # marks the client's own model; the agent has the plain names
CHUNK = 256  # items per pass: activations of small networks stay in cache


def owns(name: str) -> bool:
    return name.startswith(OWN)


def agents(name: str) -> bool:
    return not name.startswith(OWN)


@torch.no_grad()
def predictions(ctx: Context, params: Tree, x: Tensor, kind: Literal["softmax", "logits"] = "logits") -> Tensor:
    """What the model says about the items [n, classes]."""
    logits = torch.cat([ctx.forward(params, part) for part in torch.split(x, CHUNK)])
    return logits.softmax(-1) if kind == "softmax" else logits


def accuracy(ctx: Context, params: Tree, split: Split) -> float:
    """Share of right answers; 0 on an empty split."""
    return float((predictions(ctx, params, split.x).argmax(1) == split.y).float().mean()) if len(split) else 0.0
