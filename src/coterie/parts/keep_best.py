"""A client keeps the best model that it has trained, by its validation data, and uses it unless another one is better.

What a client receives rests on the participants of one round, and what it trains on few samples: both vary from round
to round. Keeping the best costs a pass over the validation data per participation and no communication. Without a
validation part nothing is kept.
"""

import math
from typing import Literal

import torch

from coterie.core.method import Batch, ClientData, Context, Split, State, Tree

Use = Literal["received", "best"]
USE = "model a client uses: as it receives it, or the best on its validation data of that and of those it trained"
BEST, SCORE = "best", "best_score"  # in a client's state
PER_LOSS = 1e-3  # of equally accurate models the one with less loss is better


@torch.no_grad()
def score(ctx: Context, params: Tree, split: Split) -> float:
    """How good a model is on these samples: accuracy, then loss; loss alone where there are no classes. One that has
    diverged is worse than any other.
    """
    outputs = ctx.forward(params, split.x)
    loss = float(ctx.loss_of(outputs, Batch(*split)))
    if not math.isfinite(loss):
        return -math.inf
    if not ctx.classes:
        return -loss
    right = float((outputs.argmax(1) == split.y).float().mean())
    return right - PER_LOSS * min(loss, 1 / (2 * len(split) * PER_LOSS))  # never worth half a sample


def kept(ctx: Context, state: State, params: Tree, data: ClientData) -> State:
    """What the client's state says of its best model, now that it has trained this one; of equals the newer."""
    if not len(data.val):
        return {}
    found = score(ctx, params, data.val)
    if found == -math.inf or (BEST in state and found < state[SCORE]):
        return {k: state[k] for k in (BEST, SCORE) if k in state}
    return {BEST: params, SCORE: found}


def best(ctx: Context, state: State, params: Tree, data: ClientData) -> Tree:
    """The model to use: this one if it is better than the best one kept."""
    if BEST not in state or not len(data.val) or score(ctx, params, data.val) > state[SCORE]:
        return params
    found: Tree = state[BEST]
    return found
