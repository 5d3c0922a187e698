"""Augmentation of training batches on the device: whole batches at once, with draws from a keyed generator."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.calls import WrittenCall, bind_call, parse_calls
from coterie.errors import CoterieError


def _crop(padding: int = 4, *, x: Tensor, rng: torch.Generator) -> Tensor:
    """Shift pictures by up to `padding` pixels; zeros, the mean of standardised data, come in from outside."""
    n, channels, height, width = x.shape
    shifts = torch.randint(0, 2 * padding + 1, (2, n), generator=rng).to(x.device)
    rows = shifts[0][:, None] + torch.arange(height, device=x.device)  # [n, height]
    columns = shifts[1][:, None] + torch.arange(width, device=x.device)
    items, every = (torch.arange(k, device=x.device) for k in (n, channels))
    at = items[:, None, None, None], every[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]
    return F.pad(x, (padding,) * 4)[at]


def _flip(share: float = 0.5, *, x: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror this share of the pictures from left to right."""
    flipped = _uniform(x, rng) < share
    return torch.where(flipped, x.flip(-1), x)


def _erase(share: float = 0.5, size: float = 0.5, *, x: Tensor, rng: torch.Generator) -> Tensor:
    """Set a rectangle to zero in this share of the pictures; its sides are at most `size` of the picture's."""
    inside = _uniform(x, rng) < share
    for axis in (-2, -1):
        length = x.shape[axis]
        side = (_uniform(x, rng) * size * length).ceil()
        first = (_uniform(x, rng) * (length - side + 1)).floor()
        places = torch.arange(length, device=x.device)
        places = places[:, None] if axis == -2 else places
        inside = inside & (places >= first) & (places < first + side)
    return x.masked_fill(inside, 0.0)


def _colour(strength: float = 0.2, *, x: Tensor, rng: torch.Generator) -> Tensor:
    """Change brightness, contrast and, in pictures of several channels, saturation."""
    brightness, contrast, saturation = (strength * (2 * _uniform(x, rng) - 1) for _ in range(3))
    grey = x.mean(1, keepdim=True)
    return (grey + (x - grey) * (1 + saturation)) * (1 + contrast) + brightness


def _jitter(sigma: float = 0.05, *, x: Tensor, rng: torch.Generator) -> Tensor:
    """Add Gaussian noise."""
    return x + sigma * torch.randn(x.shape, generator=rng).to(x.device)


def _scale(sigma: float = 0.1, *, x: Tensor, rng: torch.Generator) -> Tensor:
    """Multiply every channel of an item, or every feature, by a factor around 1."""
    factors = torch.randn(x.shape[:2], generator=rng).to(x.device)
    return x * (1 + sigma * factors.view(*x.shape[:2], *[1] * (x.ndim - 2)))


def _mixup(alpha: float = 0.2, *, x: Tensor, rng: torch.Generator) -> Tensor:
    raise NotImplementedError  # changes targets too: see `augmented`


AUGMENTATIONS: dict[str, Callable[..., Tensor]] = {
    f.__name__.removeprefix("_"): f for f in (_crop, _flip, _erase, _colour, _jitter, _scale, _mixup)
}
_OF_PICTURES = ("crop", "flip", "erase", "colour")
_LARGEST = {"padding": 256, "share": 1.0, "size": 1.0, "strength": 1.0, "sigma": 10.0, "alpha": 100.0}


def _uniform(x: Tensor, rng: torch.Generator) -> Tensor:
    """Return a number in [0, 1) for each item, in the shape that broadcasts over it."""
    return torch.rand(len(x), generator=rng).to(x.device).view(-1, *[1] * (x.ndim - 1))


@cache
def _parsed(text: str) -> tuple[WrittenCall, ...]:
    return parse_calls("augment", text)


def check_augment(text: str) -> str:
    """Return the setting `augment` in its usual spelling; raise CoterieError if it is invalid."""
    calls = parse_calls("augment", text)
    for call in calls:
        for name, value in bind_call("augment", call, AUGMENTATIONS).arguments.items():
            whole = name != "padding" or isinstance(value, int)
            if not isinstance(value, int | float) or not 0 < value <= _LARGEST[name] or not whole:
                kind = "a whole number" if name == "padding" else "a number"
                raise CoterieError(
                    f"augment = {call} is invalid: {name} must be {kind} above 0 and at most {_LARGEST[name]:g}"
                )
    return " + ".join(map(str, calls))


def check_items(text: str, example: Tensor, task: str) -> None:
    """Raise CoterieError if items like these [n, ...] cannot be augmented in this way."""
    for call in _parsed(text):
        if not example.is_floating_point():
            raise CoterieError(f"augment = {call} needs items of numbers, and these are tokens")
        if call.name in _OF_PICTURES and example.ndim != 4:
            raise CoterieError(f"augment = {call} needs pictures; items here have the shape {tuple(example.shape[1:])}")
        padding = bind_call("augment", call, AUGMENTATIONS).arguments.get("padding", 0)
        if padding and padding >= min(example.shape[2:]):
            size = "x".join(map(str, example.shape[2:]))
            raise CoterieError(f"augment = {call} shifts pictures of {size} out of sight; lower padding")
        if call.name == "mixup" and task == "survival":
            raise CoterieError("augment = mixup mixes targets, which is not defined for survival times")


def mixes(text: str | None) -> bool:
    """True if an augmentation mixes several items."""
    return text is not None and any(call.name == "mixup" for call in _parsed(text))


def augmented(text: str, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a changed copy of the items [n, ...] and targets [n, ...] of a batch."""
    for call in _parsed(text):
        if call.name == "mixup":
            alpha = float(bind_call("augment", call, AUGMENTATIONS).arguments["alpha"])
            x, y = _mixed(alpha, x, y, rng)
        else:
            x = AUGMENTATIONS[call.name](*call.values, **dict(call.options), x=x, rng=rng)
    return x, y


def _mixed(alpha: float, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mix every item with a second item of the batch (mixup, Zhang et al., 2018).

    Numbers are mixed like items. A class is drawn from the two with their shares in the mixture, so that the expected
    loss is that of mixed labels and every loss that takes classes can be used.
    """
    seed = int(torch.randint(2**62, (1,), generator=rng))
    share = torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, len(x))).float().to(x.device)
    partner = torch.randperm(len(x), generator=rng).to(x.device)
    mixed = torch.lerp(x[partner], x, share.view(-1, *[1] * (x.ndim - 1)))
    if y.is_floating_point():
        return mixed, torch.lerp(y[partner], y, share.view(-1, *[1] * (y.ndim - 1)))
    own = torch.rand(len(x), generator=rng).to(x.device) < share
    return mixed, torch.where(own, y, y[partner])
