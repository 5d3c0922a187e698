"""Different initial models for methods with several models."""

from copy import deepcopy

import torch
from torch.nn.modules.batchnorm import _NormBase

from coterie.core import tree as T
from coterie.core.context import Context
from coterie.core.net import initial
from coterie.core.rng import key
from coterie.core.tree import Tree
from coterie.errors import CoterieError


def initial_model(ctx: Context, number: int) -> Tree:
    """Return the initial model of this number: 0 is the run's own, others are draws of the same module keyed by number.

    Pre-trained parts stay as they are; a model that the user passed as an object is re-initialised.
    """
    if number == 0:
        return T.clone(ctx.w0)
    ctx.net.load(T.clone(ctx.w0))  # the copy must hold the initial values, not those of the last call
    module = deepcopy(ctx.net.module)
    module.keep_initial = False  # type: ignore[assignment]
    for sub in module.modules():
        if isinstance(sub, _NormBase) and sub.track_running_stats:
            sub.num_batches_tracked = torch.zeros((), dtype=torch.int64)  # Net has removed the counters
    initial(module, key(ctx.seed, "start", number))
    named = dict([*module.named_parameters(), *module.named_buffers()])
    return {k: named[k].detach().clone() for k in ctx.w0}


def starts(ctx: Context, count: int) -> list[Tree]:
    """Return `count` different models, the run's initial model first."""
    models = [initial_model(ctx, g) for g in range(count)]
    if count > 1 and all(torch.equal(v, models[1][k]) for k, v in ctx.w0.items()):
        raise CoterieError("this model has nothing that can be re-initialised, so several models would all start equal")
    return models
