"""Which code a plan may name: a device or an edge runs models, methods and data that its own operator chose.

Methods and models go by the names under which they are installed here. A model as `package.module:name` would import
and call whatever the cloud names, so it is refused unless the operator allowed just that (`--allow-module`).
"""

import re
from collections.abc import Iterable
from typing import Any

from coterie.config import RunSettings
from coterie.errors import CoterieError
from coterie.models.assigned import is_assignment, named

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:([A-Za-z_][A-Za-z0-9_.]*|\*)")
LONGEST = 200  # characters or items of an option of the model


def allowed(paths: Iterable[str]) -> tuple[str, ...]:
    """The operator's list, checked: `package.module:name`, or `package.module:*` for all of a module."""
    found = tuple(paths)
    for path in found:
        if not PATH.fullmatch(path):
            raise CoterieError(f'allow-module "{path}" must be package.module:name or package.module:*')
    return found


def check(settings: RunSettings, allow: Iterable[str] = ()) -> None:
    """Refuses settings that name code which is not allowed here; to be called before anything is imported or built."""
    if not WORD.fullmatch(settings.method):
        raise CoterieError(f"the plan's method {settings.method[:80]!r} is not the name of an installed method")
    models = [settings.model] if settings.model is not None else []
    if is_assignment(settings.model):
        models = [name for _, name in named(str(settings.model))]
    for model in models:
        if WORD.fullmatch(model):
            continue
        if not PATH.fullmatch(model) or model.endswith("*"):
            raise CoterieError(f"the plan's model {model[:80]!r} is neither a name nor package.module:name")
        if model not in allow and f"{model.partition(':')[0]}:*" not in allow:
            raise CoterieError(f'the plan names the code "{model}" as its model, which this host does not allow')
    for name, value in settings.model_options.items():
        values = value if isinstance(value, list) else [value]
        if not name.isidentifier() or len(values) > LONGEST or not all(map(_plain, values)):
            raise CoterieError(f"the plan's model option {name[:80]!r} is no plain value")


def _plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float) or (type(value) is str and len(value) <= LONGEST)
