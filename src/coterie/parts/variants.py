"""Variants of a method: the same settings class with other defaults."""

from copy import copy
from typing import Any, TypeVar

from pydantic import BaseModel, create_model

from coterie.parts.readings import ReadingSettings

S = TypeVar("S", bound=BaseModel)


def with_defaults(base: type[S], **defaults: Any) -> type[S]:
    """A subclass of `base` with these defaults, whatever the reading; types, bounds and descriptions stay."""
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        field = copy(base.model_fields[name])
        field.default = value
        fields[name] = (field.annotation, field)
    made = create_model(base.__name__, __base__=base, __module__=base.__module__, **fields)
    if issubclass(made, ReadingSettings):
        made.fixed = {**made.fixed, **defaults}
    return made
