"""The loss of training batches: class weights, and functions of the user that take the place of the task's loss."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from coterie.errors import CoterieError, unknown

LossFunction = Callable[[Tensor, Tensor], Tensor]  # (outputs [batch, outputs], y) -> losses [batch], or their mean
BALANCED = "balanced"
_LARGEST_RATIO = 1e5  # largest ratio of two weights that is probably meant


def check_class_weights(given: Any) -> str:
    """Return the setting `class_weights` in its usual spelling; raise CoterieError if it is invalid.

    It is "balanced", numbers in the order of the classes, or a table of numbers by the names of classes.
    """
    if isinstance(given, str) and given.strip() == BALANCED:
        return BALANCED
    words: Sequence[Any] = given.split(",") if isinstance(given, str) else ()
    if isinstance(given, str) and "=" in given:
        given = dict(_pair(word) for word in words)
    if isinstance(given, Mapping):
        return ", ".join(f"{str(name).strip()}={_number(w):.9g}" for name, w in given.items()) or _refuse(given)
    if not isinstance(given, str):
        words = list(given) if isinstance(given, list | tuple) or hasattr(given, "tolist") else ()
    return ", ".join(f"{_number(w):.9g}" for w in words) or _refuse(given)


def check_loss_path(text: str) -> str:
    """Return the setting `loss`; raise CoterieError unless it may name a function. Nothing is imported."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise CoterieError(f"loss = {text} is invalid: it must be a function of your own, package.module:function")
    return text


def weights_of_classes(setting: str | None, classes: Sequence[str]) -> tuple[float, ...] | None:
    """Return one weight for each class; None if clients balance them, or without such a setting."""
    if setting is None or setting == BALANCED:
        return None
    if "=" not in setting:
        weights = [float(word) for word in setting.split(",")]
        if len(weights) != len(classes):
            raise CoterieError(f"class_weights has {len(weights)} numbers, and the data have {len(classes)} classes")
    else:
        named = dict(_pair(word) for word in setting.split(","))
        for name in named:
            if name not in classes:
                raise unknown("class in class_weights", name, classes)
        weights = [_number(named.get(name, 1.0)) for name in classes]
    if not any(weights):
        raise CoterieError("class_weights are all 0; no class would be learnt")
    return tuple(weights)


def weight_notes(weights: tuple[float, ...] | None, classes: Sequence[str]) -> list[str]:
    """Return a warning about weights that are probably not meant."""
    if weights is None:
        return []
    if without := [name for name, w in zip(classes, weights, strict=True) if w == 0]:
        return [f"class_weights is 0 for {', '.join(without[:5])}, so models do not learn to predict it"]
    if max(weights) > _LARGEST_RATIO * min(weights):
        return [f"class_weights lie between {min(weights):g} and {max(weights):g}; the small ones have no effect"]
    return []


def class_weights(setting: str | None, fixed: tuple[float, ...] | None, y: Tensor, classes: int) -> Tensor | None:
    """Return the weights of the classes [classes] for a client with training targets y; None without such a setting.

    Balanced weights are inversely proportional to the client's numbers of samples, so all its classes weigh alike.
    """
    if fixed is not None:
        return _tensor(fixed)
    if setting != BALANCED:
        return None
    counts = torch.bincount(y, minlength=classes).double()
    return torch.where(counts > 0, len(y) / (counts.clamp(min=1) * (counts > 0).sum()), 1.0).float()


def batch_loss(each: Tensor, y: Tensor, weights: Tensor | None, real: Tensor | None) -> Tensor:
    """Return the mean of losses [batch], weighted by class as torch.nn.CrossEntropyLoss(weight=...) does.

    `real` [batch] is 0 for padding. A mean is returned as it is.
    """
    if each.ndim == 0:
        return each
    weight = None if weights is None else weights[y]
    if real is not None:
        weight = real if weight is None else weight * real
    return each.mean() if weight is None else (each * weight).sum() / weight.sum().clamp(min=1e-12)


def check_loss(path: str, function: LossFunction, outputs: Tensor, y: Tensor, weighted: bool) -> None:
    """Raise CoterieError if a loss of the user fails for these outputs and targets, or cannot be trained with."""
    outputs = outputs.detach().clone().requires_grad_()
    try:
        with torch.enable_grad():
            value = function(outputs, y)
    except Exception as e:  # whatever a function of the user raises
        why = (str(e).splitlines() or [""])[0][:200]
        raise CoterieError(f"loss = {path} cannot be computed: {type(e).__name__}: {why}") from None
    shape = f"a {type(value).__name__}" if not isinstance(value, Tensor) else f"a tensor of shape {list(value.shape)}"
    if not isinstance(value, Tensor) or value.shape not in ((), y.shape[:1]):
        raise CoterieError(f"loss = {path} returns {shape}; it must return one loss per item [batch], or their mean")
    if not value.requires_grad:
        raise CoterieError(f"loss = {path} does not depend on the outputs of the model, so nothing can be learnt")
    if weighted and value.ndim == 0:
        raise CoterieError(f"class_weights needs losses per item [batch], and loss = {path} returns their mean")


@cache
def _tensor(weights: tuple[float, ...]) -> Tensor:
    return torch.tensor(weights)


def _pair(text: str) -> tuple[str, str]:
    name, _, weight = text.rpartition("=")
    return name.strip(), weight


def _number(given: Any) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = -1.0
    return value if 0 <= value <= 1e9 else float(_refuse(given))


def _refuse(given: Any) -> str:
    raise CoterieError(
        f"class_weights = {str(given).strip()[:80]} is invalid: it must be balanced, numbers in the order of the "
        "classes such as 1, 5, or numbers by class such as healthy=1, ill=5; none below 0"
    )
