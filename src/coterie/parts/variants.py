"""Variants of a method: subclasses with different defaults."""

from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import create_model

from coterie.core.method import Method, Settings

M = TypeVar("M", bound=Method)
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


def variant(base: type[M], name: str, title: str, doc: str, **defaults: Any) -> type[M]:
    """Return a subclass of a method, called `name`, with a title of its own and these defaults of its settings."""
    own = {"Settings": with_defaults(base.Settings, **defaults), "card": replace(base.card, title=title)}
    return type(name, (base,), {"__doc__": doc, "__module__": base.__module__, **own})
