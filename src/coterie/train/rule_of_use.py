"""The rule of use decides which of the models that a client receives and trains is the one it uses, for every method.

- received: the model that the method makes for the client now.
- trained: the client's model as its last local training left it.
- best: the best of the model made now and of all models that the client has trained, by its validation data. A received
  model depends on the participants of one round and a trained one on few samples, so both vary from round to round.
- guarded: best, unless the client's own model, trained in the same rounds on its own data alone, is better on the
  validation data by more than a standard error; then that one. Its training is counted.

A client that has not trained yet uses the received model. A client without validation data
has no best model and uses the received one.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coterie.core.context import ClientData, Split
from coterie.core.method import Method, Model, Phase, TaskLoss
from coterie.core.tree import Tree
from coterie.core.views import Use
from coterie.train.devices import CPU

UseMemory = Mapping[str, Any]  # a client's `params`, `extras` and `score` of the model kept, and `local` if guarded
PER_LOSS = 1e-3  # weight of the loss, which decides between equally accurate models
NEED_VALIDATION: tuple[Use, ...] = ("best", "guarded")  # rules that need validation data


@torch.no_grad()
def quality(method: Method, model: Model, split: Split) -> float:
    """Return how good a model is on these samples: by accuracy, then by loss; by loss alone without classes.

    A model that has diverged has minus infinity.
    """
    outputs = method.predict(model.params, split.x, model.extras)
    loss = float(method.ctx.task.loss(outputs, split.y))
    if not math.isfinite(loss):
        return -math.inf
    if not method.ctx.classes:
        return -loss
    right = float((outputs.argmax(1) == split.y).float().mean())
    return right - PER_LOSS * min(loss, 1 / (2 * len(split) * PER_LOSS))  # the loss never outweighs half a sample


def after_training(method: Method, use: Use, memory: UseMemory, model: Model, data: ClientData) -> dict[str, Any]:
    """Return the memory after a client has trained `model`; the newer of two equal models is kept."""
    new = {**memory, "params": model.params, "extras": dict(model.extras)}
    if use == "trained":
        return new
    if not len(data.val):
        return dict(memory)
    found = quality(method, model, data.val)
    if found == -math.inf or ("params" in memory and found < memory["score"]):
        return dict(memory)
    return {**new, "score": found}


def model_used(method: Method, use: Use, memory: UseMemory, received: Model, data: ClientData) -> Model:
    """Return the model that the client uses; `received` is the one that the method makes for it now."""
    if use == "received" or not memory:
        return received
    kept = Model(memory["params"], memory["extras"]) if "params" in memory else None
    if use == "trained":
        return kept or received
    if not len(data.val):
        return received
    better = kept is None or quality(method, received, data.val) > memory["score"]
    best = received if kept is None or better else kept
    if use == "guarded" and "local" in memory:
        local = Model(memory["local"])
        return local if clearly_better(method, local, best, data.val) else best
    return best


@torch.no_grad()
def clearly_better(method: Method, local: Model, best: Model, split: Split) -> bool:
    """True if the local model is better on these samples by more than a standard error of the paired difference."""
    own = method.ctx.forward(local.params, split.x)
    outputs = method.predict(best.params, split.x, best.extras)
    sound, best_is_sound = bool(torch.isfinite(own).all()), bool(torch.isfinite(outputs).all())
    if not (sound and best_is_sound):
        return sound
    gains = _per_sample(method, own, split) - _per_sample(method, outputs, split)
    return len(gains) > 1 and float(gains.mean()) > float(gains.std()) / math.sqrt(len(gains))


def _per_sample(method: Method, outputs: Tensor, split: Split) -> Tensor:
    """Return a value per sample, higher is better: right or wrong with classes, otherwise the negative loss."""
    if method.ctx.classes:
        return (outputs.argmax(1) == split.y).float().to(CPU).double()
    return -method.ctx.task.each(outputs, split.y).to(CPU).double()


def local_phases(method: Method) -> list[Phase]:
    """Return the phases that continue a client's own local model: those of Local-Only."""
    return [Phase(TaskLoss(method.ctx))]


def local_start(method: Method, memory: UseMemory) -> Tree:
    """Return the model that the client's own local training continues from."""
    tree: Tree = memory.get("local", method.ctx.w0)
    return tree
