"""A client keeps the best model that it has trained, by its validation data, and uses it unless a new one is better.

A received model depends on the participants of one round, and a trained one on few samples: both vary from round to
round. Keeping the best costs a pass over the validation data per participation and no communication. A client without a
validation part keeps nothing.
"""

import math
from typing import Literal

import torch

from coterie.core.context import Batch, ClientData, Context, Split, State
from coterie.core.tree import Tree

Use = Literal["received", "best"]
USE = "model a client uses: as it receives it, or the best on its validation data of that and of those it trained"
BEST, SCORE = "best", "best_score"  # keys in a client's state
PER_LOSS = 1e-3  # weight of the loss, which decides between equally accurate models


@torch.no_grad()
def validation_score(ctx: Context, params: Tree, split: Split) -> float:
    """Return how good a model is on these samples: by accuracy, then by loss; by loss alone without classes.

    A model that has diverged scores minus infinity.
    """
    outputs = ctx.forward(params, split.x)
    loss = float(ctx.loss_of(outputs, Batch(*split)))
    if not math.isfinite(loss):
        return -math.inf
    if not ctx.classes:
        return -loss
    right = float((outputs.argmax(1) == split.y).float().mean())
    return right - PER_LOSS * min(loss, 1 / (2 * len(split) * PER_LOSS))  # the loss never outweighs half a sample


def kept(ctx: Context, state: State, params: Tree, data: ClientData) -> State:
    """Return the state entries of the best model after training `params`; the newer of two equal models is kept."""
    if not len(data.val):
        return {}
    score = validation_score(ctx, params, data.val)
    if score == -math.inf or (BEST in state and score < state[SCORE]):
        return {k: state[k] for k in (BEST, SCORE) if k in state}
    return {BEST: params, SCORE: score}


def best(ctx: Context, state: State, params: Tree, data: ClientData) -> Tree:
    """Return the model to use: `params` if it is better than the best model kept."""
    if BEST not in state or not len(data.val) or validation_score(ctx, params, data.val) > state[SCORE]:
        return params
    kept_model: Tree = state[BEST]
    return kept_model
