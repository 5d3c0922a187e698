"""The setting `dp`: which guarantee of differential privacy a run gives, as a typed value.

client(...)   all that one client uploads in a run; clipped at the device, noised where uploads are combined
example(...)  one training sample of a client; gradients of single samples are clipped and noised at the device
local(...)    all that one client uploads, against the cloud too; clipped and noised at the device
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from coterie.core.calls import bind_call, parse_calls
from coterie.errors import CoterieError

Unit = Literal["client", "example", "local"]
LARGEST_SIGMA = 1e6  # larger noise multipliers and epsilons are typing errors
USUAL_DELTA = 1e-5


@dataclass(frozen=True)
class PrivacySetting:
    """A parsed setting `dp`; either epsilon or sigma may be None, and then follows from the other."""

    unit: Unit
    epsilon: float | None
    delta: float
    clip: float
    sigma: float | None  # standard deviation of the noise divided by the sensitivity of the clipped sum
    adaptive: float | None = None  # quantile of the clients' norms that the clipping bound follows
    scores: bool = False  # devices of a federation send counts of predictions, which no noise protects
    text: str = ""  # the setting in its usual spelling


# ---- functions that name the options of a setting, with their defaults ----------------------------------------------
def _client(
    epsilon: float | None = None, delta: float = USUAL_DELTA, clip: float = 1.0, sigma: float | None = None,
    adaptive: float | None = None, scores: bool = False,
) -> None: ...  # fmt: skip


def _at_device(
    epsilon: float | None = None, delta: float = USUAL_DELTA, clip: float = 1.0, sigma: float | None = None,
    scores: bool = False,
) -> None: ...  # fmt: skip


_UNITS: dict[str, Callable[..., Any]] = {"client": _client, "example": _at_device, "local": _at_device}


@cache
def privacy_setting(text: str) -> PrivacySetting:
    """Return the setting that a text states; raise CoterieError if it is invalid."""
    calls = parse_calls("dp", text)
    if len(calls) > 1:
        raise CoterieError(f"dp = {text} is invalid: it must be one of client(...), example(...) and local(...)")
    given = bind_call("dp", calls[0], _UNITS).arguments
    for name in ("epsilon", "sigma"):
        if given[name] is not None:
            _check_number(text, name, given[name], 0.0, LARGEST_SIGMA)
    _check_number(text, "delta", given["delta"], 0.0, 1.0)
    _check_number(text, "clip", given["clip"], 0.0, LARGEST_SIGMA)
    if given.get("adaptive") is not None:
        _check_number(text, "adaptive", given["adaptive"], 0.0, 1.0)
    if not isinstance(given["scores"], bool):
        raise CoterieError(f"dp = {text} is invalid: scores must be True or False")
    if given["epsilon"] is None and given["sigma"] is None:
        raise CoterieError(f"dp = {text} is invalid: it needs epsilon or sigma, such as {calls[0].name}(epsilon=8)")
    return PrivacySetting(unit=calls[0].name, text=str(calls[0]), **given)  # type: ignore[arg-type]


def check_privacy(text: str) -> str:
    """Return the setting `dp` in its usual spelling; raise CoterieError if it is invalid."""
    return privacy_setting(text).text


def _check_number(text: str, name: str, value: Any, low: float, high: float) -> None:
    """Raise CoterieError unless the value is a number between the bounds, which are excluded."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise CoterieError(f"dp = {text} is invalid: {name} must be a number above {low:g} and below {high:g}")
