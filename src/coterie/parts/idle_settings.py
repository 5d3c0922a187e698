"""Settings that other settings leave without effect: a value that is not the default raises CoterieError."""

from collections.abc import Mapping
from typing import Any

from coterie.core.method import Settings
from coterie.errors import CoterieError


def refuse_idle(hp: Settings, title: str, preset: Mapping[str, Any], *rules: tuple[str, bool, str]) -> None:
    """Raise CoterieError for the first setting with a value of its own that has no effect.

    A rule holds names of settings (separated by blanks), whether these have an effect, and the condition for it in
    words. Values of `preset` count as defaults.
    """
    for names, used, condition in rules:
        for name in () if used else names.split():
            field = type(hp).model_fields.get(name)
            if field is not None and getattr(hp, name) != preset.get(name, field.default):
                raise CoterieError(f"{title}: {name} = {getattr(hp, name)} has no effect unless {condition}")
