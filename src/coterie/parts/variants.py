"""Variants of a method: the same settings class with different defaults."""

from copy import copy
from typing import Any, TypeVar

from pydantic import create_model

from coterie.core.method import Settings

S = TypeVar("S", bound=Settings)


def with_defaults(base: type[S], **defaults: Any) -> type[S]:
    """Return a subclass of `base` with these defaults in every reading; types, bounds and descriptions stay."""
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        field = copy(base.model_fields[name])
        field.default = value
        fields[name] = (field.annotation, field)
    made = create_model(base.__name__, __base__=base, __module__=base.__module__, **fields)
    made.fixed = {**base.fixed, **defaults}
    return made
