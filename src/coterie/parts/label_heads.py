"""A server's stack of heads and what clients send to train it: mean features with their labels (FedGMH)."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree as T
from coterie.method import ClientData, Context, Settings
from coterie.parts.heads import Heads, label_targets, pack, train_heads
from coterie.parts.prototypes import collect
from coterie.tree import Tree


class ServerHeads(Settings):
    """How a server trains its heads."""

    eta_h: float = Field(1.0, gt=0, description="rate of the server's training of the heads")
    server_steps: int = Field(1, ge=0, description="passes of the server over the received features per round")
    server_batch: int = Field(0, ge=0, description="features of one head per step; 0: all")
    head_weight_decay: float = Field(0.0, ge=0, description="weight decay of the server's heads")
    feature_norm: Literal["none", "l2"] = Field("none", description="l2: received features are scaled to length one")
    feature_weight: Literal["uniform", "samples"] = Field("uniform", description="samples: counts are sent and weigh")


def head_of(ctx: Context, tree: Tree) -> Tree:
    """The entries of the model's head."""
    return T.keep(tree, ctx.group("head").__contains__)


def mean_features(ctx: Context, params: Tree, data: ClientData, hp: ServerHeads) -> Tree:
    """Mean feature of each label present [labels, d], the labels, and their sample counts if these weigh."""
    (value, mask), counts = collect(lambda x: ctx.features(params, x), *data.train, data.classes)
    tree = {"x:means": value[mask], "x:labels": mask.nonzero()[:, 0].int()}
    return tree | ({"x:counts": counts[mask].int()} if hp.feature_weight == "samples" else {})


def server_step(ctx: Context, stack: Mapping[str, Tensor], sent: Sequence[Tree], hp: ServerHeads) -> Tree:
    """Heads [heads, ...] trained on what clients sent: head s on label s alone, a single head on everything.

    Every vector counts as much as any other of its label unless counts came with it; a head without any stays.
    """
    if not sent:
        return dict(stack)
    weight, bias = ctx.net.head_names
    z, y = torch.cat([t["x:means"] for t in sent]), torch.cat([t["x:labels"] for t in sent]).long()
    w = torch.cat([t.get("x:counts", torch.ones(len(t["x:means"]))) for t in sent]).to(z)
    if len(stack[weight]) == 1:
        z, y, w = z[None], y[None], w[None]
    else:
        z, w = pack(y, z, len(stack[weight]), w)
        y = label_targets(w)
    heads = Heads(stack[weight], stack[bias] if bias else None)
    new = train_heads(heads, z, y, w, hp.eta_h, hp.server_steps, hp.server_batch, hp.head_weight_decay, hp.feature_norm)
    return {weight: new.weight} | ({bias: new.bias} if bias and new.bias is not None else {})


def paced(loss: Tensor, pace: float) -> Tensor:
    """The loss with its gradient scaled by `pace`: for SGD the same as a rate scaled by it."""
    return loss if pace == 1 else pace * loss + (1 - pace) * loss.detach()
