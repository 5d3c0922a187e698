"""Different starting points for methods with several models."""

from copy import deepcopy

import torch
from torch.nn.modules.batchnorm import _NormBase

from coterie.core import tree as T
from coterie.core.method import Context
from coterie.core.net import initial
from coterie.core.rng import key
from coterie.core.tree import Tree
from coterie.errors import CoterieError


def start(ctx: Context, number: int) -> Tree:
    """Number 0 is the run's own start, any other a fresh draw of the same module keyed by it.

    Pre-trained parts stay as they are; a model that the user built as a whole is re-initialised.
    """
    if number == 0:
        return T.clone(ctx.w0)
    ctx.net.load(T.clone(ctx.w0))  # so that the copy is of the start, not of what was called last
    module = deepcopy(ctx.net.module)
    module.keep_initial = False  # type: ignore[assignment]
    for sub in module.modules():
        if isinstance(sub, _NormBase) and sub.track_running_stats:
            sub.num_batches_tracked = torch.zeros((), dtype=torch.int64)  # Net has taken the counters out
    initial(module, key(ctx.seed, "start", number))
    named = dict([*module.named_parameters(), *module.named_buffers()])
    return {k: named[k].detach().clone() for k in ctx.w0}


def starts(ctx: Context, count: int) -> list[Tree]:
    """`count` different models, the run's own start first."""
    models = [start(ctx, g) for g in range(count)]
    if count > 1 and all(torch.equal(v, models[1][k]) for k, v in ctx.w0.items()):
        raise CoterieError("this model has nothing that can be re-initialised, so several models would all start equal")
    return models
