"""Dataclasses that may be part of a state, a message or a file. They are stored and sent under their names."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar, dataclass_transform

from coterie.errors import CoterieError

C = TypeVar("C", bound=type)
STATE_CLASSES: dict[str, type] = {}


def register(cls: C) -> C:
    """Decorate a dataclass whose instances may be part of a value; raise CoterieError if its name is taken."""
    known = STATE_CLASSES.get(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise CoterieError(f"{cls.__module__}.{cls.__name__} cannot be stored: {known.__module__} has the same name")
    STATE_CLASSES[cls.__name__] = cls
    return cls


@dataclass_transform(frozen_default=True)
def state(cls: C) -> C:
    """Decorate a class that is the state of a server or a client: make it a frozen dataclass that can be stored."""
    dataclass(frozen=True)(cls)  # changes the class itself
    return register(cls)


def typed(name: str | None, stored: Any) -> Any:
    """Return a dictionary of version 0.1 as the dataclass of this name, without keys that it has no longer."""
    if name is None or not isinstance(stored, dict):
        return stored
    known = {f.name for f in fields(STATE_CLASSES[name])}
    return STATE_CLASSES[name](**{k: v for k, v in stored.items() if k in known})
