"""Methods, one file or folder each; found by the entry points `coterie.methods`, so other packages can add theirs."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from coterie.errors import CoterieError, unknown
from coterie.method import Method

GROUP = "coterie.methods"


@cache
def _points() -> dict[str, EntryPoint]:
    return {p.name: p for p in entry_points(group=GROUP)}


def known() -> list[str]:
    return sorted(_points())


def canonical(name: str) -> str:
    """As it is registered: spelling differs only by case, dashes and underscores. Unknown names stay as they are."""
    plain = name.lower().replace("_", "-")
    return next((key for key in (plain, plain.replace("-", "")) if key in _points()), name)


def find(name: str) -> type[Method]:
    """The class behind a name."""
    key = canonical(name)
    if key not in _points():
        raise unknown("method", name, _points())
    try:
        method = _points()[key].load()
    except (ImportError, AttributeError) as e:
        raise CoterieError(f'the method "{key}" is registered but cannot be loaded: {e}') from e
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise CoterieError(f'the entry point "{key}" of group {GROUP} is not a Method')
    return method


def controls(method: str | type[Method]) -> tuple[str, ...]:
    """The controls that a method names itself; those of its base class are not its own."""
    cls = find(method) if isinstance(method, str) else method
    return tuple(vars(cls).get("controls", ()))


def build(method: str | type[Method], settings: dict[str, Any] | None = None) -> Method:
    """An unbound method with its settings checked."""
    cls = find(method) if isinstance(method, str) else method
    fields = cls.Settings.model_fields
    for key in settings or {}:
        if key not in fields:
            raise (
                unknown(f"setting of {cls.__name__}", key, fields)
                if fields
                else CoterieError(f'{cls.__name__} has no settings, so "{key}" cannot be set')
            )
    try:
        return cls(**(settings or {}))
    except ValidationError as e:
        raise CoterieError(sentence(cls.__name__, e)) from None


def sentence(where: str, error: ValidationError) -> str:
    """The first error of pydantic as one sentence."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"])) or "settings"
    text = first["msg"].removeprefix("Value error, ")
    text = f"{text[0].lower()}{text[1:]}"
    for old, new in (("input should be", "it must be"), ("input should have", "it must have")):
        text = text.replace(old, new, 1) if text.startswith(old) else text
    if first["type"] == "missing":
        return f"{where}: {name} is missing"
    return f"{where}: {name} = {first.get('input')!r} is invalid: {text}"
