"""The configuration of a Flower run: the settings of `coterie run`, and a table `cloud` with those of the cloud.

Flower allows no lists in a configuration; lists and tables are JSON text.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from coterie.config import RunSettings, settings
from coterie.errors import CoterieError, unknown
from coterie.federation.cloud.program import CloudSettings
from coterie.methods import validation_sentence

_CLOUD = "cloud."
_ELSEWHERE = {"certs", "host", "port", "run"}  # settings of the cloud that a SuperLink has in its place


def read_config(config: Mapping[str, Any]) -> tuple[RunSettings, CloudSettings]:
    """Return the settings in a run's configuration; raise CoterieError if one is unknown or invalid."""
    known = {f.name.replace("_", "-") for f in fields(CloudSettings)} - _ELSEWHERE
    values, given = {"certs": ""}, {}
    for key, value in config.items():
        name = key.removeprefix(_CLOUD)
        if name == key:
            given[key] = _parse(key, value)
        elif name != "out":
            if name not in known:
                raise unknown("setting of the table cloud", name, [*known, "out"])
            values[name.replace("-", "_")] = _parse(key, value)
    try:
        cloud = TypeAdapter(CloudSettings).validate_python(values)
    except ValidationError as e:
        raise CoterieError(validation_sentence("cloud", e)) from None
    return settings(**given), cloud


def run_folder(config: Mapping[str, Any]) -> Path:
    """Return the folder of the run on the host of the SuperLink."""
    return Path(str(config.get(f"{_CLOUD}out") or f"runs/{config.get('method', 'flower')}-flower"))


def _parse(key: str, value: Any) -> Any:
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise CoterieError(f"{key} = {value!r} is not JSON: {e}") from None
