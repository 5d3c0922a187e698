"""Find the method of this version that does what the settings in a file say."""

from collections.abc import Mapping
from typing import Any, get_args

from coterie import methods
from coterie.core.method import Method
from coterie.errors import CoterieError
from coterie.methods.stored import ALWAYS, names_today


def restored(name: str | type[Method], stored: Mapping[str, Any]) -> tuple[str | type[Method], dict[str, Any]]:
    """Return the method and the settings that do today what a file says; the file may be of version 0.1."""
    names = names_today(methods.registered_name(name), stored.get("reading")) if isinstance(name, str) else []
    for key in (key for key in names if key in methods.BUILT_IN):
        has = methods.fields(key)
        always = {
            k: v for base in reversed(methods.find(key).__mro__) for k, v in ALWAYS.get(base.__name__, {}).items()
        }
        odd = {k: v for k, v in stored.items() if k not in has and always.get(k, v) != v}
        kept = {k: v for k, v in stored.items() if k in has}
        if "reading" in kept and kept["reading"] not in get_args(has["reading"].annotation):
            del kept["reading"]
        if not odd and _fits(key, kept):
            return key, kept
    if names:
        raise CoterieError(
            f'the method "{name}" was run by version 0.1 with settings of several readings, which no '
            f"method of this version combines: {', '.join(f'{k} = {v}' for k, v in stored.items())}"
        )
    return name, dict(stored)


def _fits(name: str, settings: Mapping[str, Any]) -> bool:
    """True if a method can be built with these settings."""
    try:
        methods.build_method(name, settings)
    except CoterieError:
        return False
    return True
