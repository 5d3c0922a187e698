"""Parse settings that are written as calls: adamw(betas=(0.9, 0.99)), warmup(5) + cosine, crop(4) + flip."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from coterie.errors import CoterieError, unknown

_LONGEST = 400  # characters of such a setting
_HYPHEN = re.compile(r"(?<=[a-z])-(?=[a-z])")  # within a name


@dataclass(frozen=True)
class WrittenCall:
    """A name with positional values and options."""

    name: str
    values: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        inside = [*map(repr, self.values), *(f"{k}={v!r}" for k, v in self.options)]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


def parse_calls(setting: str, text: Any) -> tuple[WrittenCall, ...]:
    """Return the calls in a text, which are joined by "+"; raise CoterieError if it is not of this form."""
    try:
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise ValueError
        return tuple(_calls(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        shown = text if len(str(text)) < 80 else f"{str(text)[:80]}..."
        raise CoterieError(f"{setting} = {shown} is invalid: it must be a name or name(value, option=value)") from None


def parse_named_call(setting: str, text: Any) -> WrittenCall:
    """Return the only call in a text, whose name may have hyphens: multi-krum(f=2)."""
    written = _HYPHEN.sub("_", text.lower()) if isinstance(text, str) else text
    calls = parse_calls(setting, written)
    if len(calls) > 1:
        raise CoterieError(f"{setting} = {text} is invalid: it must be one name, without +")
    return replace(calls[0], name=calls[0].name.replace("_", "-"))


def _calls(node: ast.expr) -> list[WrittenCall]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_calls(node.left), *_calls(node.right)]
    if isinstance(node, ast.Name):
        return [WrittenCall(node.id.lower())]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError
    values = tuple(ast.literal_eval(v) for v in node.args)
    options = tuple((k.arg or "", ast.literal_eval(k.value)) for k in node.keywords)
    if not all(map(_is_number, [*values, *(v for _, v in options)])) or len(dict(options)) < len(options):
        raise ValueError
    return [WrittenCall(node.func.id.lower(), values, options)]


def _is_number(value: Any) -> bool:
    """True for a finite number, True, False, None and tuples of them."""
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return value is None or (isinstance(value, int | float) and abs(value) <= 1e9)


def bind_call(setting: str, call: WrittenCall, known: Mapping[str, Callable[..., Any]]) -> inspect.BoundArguments:
    """Match a call with the parameters of the function of its name, which all must be given numbers."""
    if call.name not in known:
        raise unknown(setting, call.name, known)
    signature = _signature(known[call.name])
    try:
        bound = signature.bind(*call.values, **dict(call.options))
    except TypeError as e:
        raise CoterieError(f"{setting} = {call} is invalid: {e}; write {call.name}{signature}") from None
    bound.apply_defaults()
    return bound


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the parameters that a setting gives, without types: those before the first one that is keyword-only."""
    given = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return inspect.Signature([p.replace(annotation=p.empty) for p in given])
