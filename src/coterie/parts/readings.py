"""Readings of a paper: named presets over a method's other settings.

`paper` or `text` is what the paper says, `code` what the authors' published code (or the framework they evaluated in)
does. The defaults of a variant override a reading, and the user's settings override both. Readings with different
protocols are different classes (coterie.methods.READINGS).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from coterie.core.method import Settings


class ReadingSettings(Settings):
    """Settings with a field `reading` and a table of each reading's values."""

    readings: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        reading = given.get("reading", cls.model_fields["reading"].default)
        return {**cls.preset(reading), **cls.fixed, **given}

    @classmethod
    def preset(cls, reading: Any) -> dict[str, Any]:
        """Return what a reading sets of the settings that this class has; nothing for an unknown reading."""
        values = cls.readings.get(reading, {}) if isinstance(reading, str) else {}
        return {name: value for name, value in values.items() if name in cls.model_fields}
