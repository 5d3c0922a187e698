"""Writes a Flower project whose ServerApp and ClientApp are Coterie's; this module does not need Flower."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.config import RunSettings
from coterie.errors import CoterieError
from coterie.flower.run_config import read_config
from coterie.storage.atomic import write_atomic

_APP_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
_SHOWN = ("data", "model", "clients", "partition", "join", "rounds", "epochs", "batch", "lr", "seed", "eval_every")
_PROJECT = """\
# A Flower project that runs Coterie: `flwr run` starts it on the SuperLink of your Flower configuration.

[project]
name = "{name}"
version = "0.1.0"
description = "{method} with Coterie"
license = "Apache-2.0"
dependencies = ["coterie[flower]"]

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "coterie.flower.server_app:server_app"
clientapp = "coterie.flower.client_app:client_app"

[tool.flwr.app.config]
# settings of the run, the data and the method, as in `coterie run`; lists and tables are JSON text
{settings}

[tool.flwr.app.config.cloud]
# on the host of the SuperLink; a relative folder is below its working directory
{cloud}
"""


def write_project(folder: Path, given: Mapping[str, Any], cloud: Mapping[str, Any]) -> None:
    """Write pyproject.toml with these settings; raise CoterieError if one is invalid or the folder is in use."""
    name = folder.resolve().name
    if not _APP_NAME.fullmatch(name):
        raise CoterieError(
            f'the folder "{name}" must start with a letter and have at most 32 letters, digits and hyphens: '
            "it is the name of the Flower app"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CoterieError(f"{folder} exists and is not empty")
    table = {key.replace("_", "-"): str(v) if isinstance(v, Path) else v for key, v in cloud.items() if v}
    chosen, rules = read_config({**given, **{f"cloud.{key}": value for key, value in table.items()}})
    hidden = ("data", "partition") if rules.shape else ()
    shown = {n: v for n in _SHOWN if n not in hidden and (v := _value(chosen, n)) is not None}
    out = {"out": f"runs/{name}", "min-clients": rules.min_clients, "deadline": rules.deadline}
    text = _PROJECT.format(
        name=name.lower(),
        method=chosen.method,
        settings=_lines({"method": chosen.method, **shown, **given}),
        cloud=_lines({**out, **table}),
    )
    write_atomic(folder / "pyproject.toml", text.encode())


def _value(settings: RunSettings, name: str) -> Any:
    return getattr(settings if name in RunSettings.model_fields else settings.federation, name)


def _lines(values: Mapping[str, Any]) -> str:
    """Return TOML; text that JSON quotes is text that TOML reads."""
    plain = {k: json.dumps(v) if isinstance(v, list | tuple | dict) else v for k, v in values.items()}
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in plain.items())
