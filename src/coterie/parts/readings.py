"""Readings of a paper: named presets over a method's other settings.

`paper` is the text, `code` what the authors' published code (or the framework they evaluated in) does, `mended` the
smallest change that keeps the paper's idea and works. The defaults of a variant override a reading, and the
user's settings override both.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from coterie.core.method import Settings


class ReadingSettings(Settings):
    """Settings with a field `reading` and a table of what each reading sets; the fields' own defaults are `paper`."""

    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}  # what a variant sets in every reading (see with_defaults)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        reading = given.get("reading", cls.model_fields["reading"].default)
        return {**cls.preset(reading), **cls.fixed, **given}

    @classmethod
    def preset(cls, reading: Any) -> dict[str, Any]:
        """What a reading sets of the settings that this class has; nothing for one it does not know."""
        found = cls.readings.get(reading, {}) if isinstance(reading, str) else {}
        return {name: value for name, value in found.items() if name in cls.model_fields}
