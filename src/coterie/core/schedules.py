"""Learning-rate schedules: factors of the learning rate as closed forms, so that nothing has to be stored."""

import math
from collections.abc import Callable
from functools import cache

from coterie.core.calls import WrittenCall, bind_call, parse_calls
from coterie.errors import CoterieError


def _step(every: int, factor: float = 0.1, *, at: int, of: int) -> float:
    """Multiply by `factor` once in `every` rounds or steps, as StepLR does."""
    _need(every >= 1 and 0 < factor <= 1, "step(every, factor) takes every >= 1 and 0 < factor <= 1")
    return float(factor ** (at // every))


def _exponential(factor: float, *, at: int, of: int) -> float:
    """Multiply by `factor` in every round or step, as ExponentialLR."""
    _need(0 < factor <= 1, "exponential(factor) takes 0 < factor <= 1")
    return float(factor**at)


def _cosine(end: float = 0.0, *, at: int, of: int) -> float:
    """Fall to the share `end` along half a cosine, as CosineAnnealingLR."""
    _need(0 <= end <= 1, "cosine(end) takes 0 <= end <= 1")
    return float(end + (1 - end) * (1 + math.cos(math.pi * at / of)) / 2)


def _linear(end: float = 0.0, *, at: int, of: int) -> float:
    """Fall to the share `end` along a line, as LinearLR."""
    _need(0 <= end <= 1, "linear(end) takes 0 <= end <= 1")
    return float(1 + (end - 1) * at / of)


def _warmup(count: int, start: float = 0.1, *, at: int, of: int) -> float:
    """Rise from the share `start` to 1 in `count` rounds or steps, as LinearLR."""
    _need(count >= 1 and 0 < start <= 1, "warmup(count, start) takes count >= 1 and 0 < start <= 1")
    return float(start + (1 - start) * min(at, count) / count)


SCHEDULES: dict[str, Callable[..., float]] = {
    f.__name__.removeprefix("_"): f for f in (_step, _exponential, _cosine, _linear, _warmup)
}
USE_LENGTH = ("cosine", "linear")  # schedules that depend on the number of rounds or steps


def lr_factor(schedule: str | None, at: int, of: int) -> float:
    """Return the factor of the learning rate at position `at`, from 0, of `of` rounds or steps.

    After the end it keeps its last value.
    """
    if schedule is None:
        return 1.0
    at = max(0, min(at, of - 1))
    return math.prod(_value(call, at, of) for call in _parsed(schedule))


def check_schedule(setting: str, schedule: str) -> str:
    """Return a schedule in its usual spelling; raise CoterieError if it is invalid."""
    calls = parse_calls(setting, schedule)
    for call in calls:
        bind_call(setting, call, SCHEDULES)
        try:
            _value(call, 0, 1)
        except TypeError:
            raise CoterieError(f"{setting} = {call} is invalid: its values must be numbers") from None
        except CoterieError as e:
            raise CoterieError(f"{setting} = {call} is invalid: {e}") from None
    return " + ".join(map(str, calls))


def uses_length(schedule: str | None) -> bool:
    """True if a schedule depends on the planned number of rounds."""
    return schedule is not None and any(call.name in USE_LENGTH for call in _parsed(schedule))


def _value(call: WrittenCall, at: int, of: int) -> float:
    return SCHEDULES[call.name](*call.values, **dict(call.options), at=at, of=of)


@cache
def _parsed(schedule: str) -> tuple[WrittenCall, ...]:
    return parse_calls("schedule", schedule)


def _need(holds: bool, sentence: str) -> None:
    if not holds:
        raise CoterieError(sentence)
