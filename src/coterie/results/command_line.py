"""The command line that repeats a run."""

import json
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from coterie.config import RunSettings
from coterie.data.settings import PartitionSettings

_OPTIONS = ("data", "model", "partition", "clients", "join", "rounds", "epochs", "batch", "lr", "seed")
_ALWAYS = ("data", "partition", "clients", "rounds")  # named even where they have their default


def run_command(settings: Mapping[str, Any], data_dir: str | None = None, leave_out: Collection[str] = ()) -> str:
    """Return the `coterie run` command with these settings of a run, in the form of settings.json.

    Settings that have their default, and those of `leave_out`, are not named.
    """
    given = {k: v for k, v in settings.items() if k not in ("method", "settings", "federation", *leave_out)}
    given = {k: v for k, v in given.items() if k in _ALWAYS or v != _default(RunSettings, k)}
    federation = settings["federation"].items()
    given |= {k: v for k, v in federation if k in _ALWAYS or v != _default(PartitionSettings, k)}
    given |= settings["settings"]
    words = ["coterie", "run", str(settings["method"])]
    for k in _OPTIONS:
        if given.get(k) is not None:
            words += [f"--{k}", _text(given[k])]
    if data_dir:
        words += ["--data-dir", data_dir]
    for k, v in given.items():
        if k not in _OPTIONS and v is not None:
            words += ["--set", f"{k}={_text(v)}"]
    return shlex.join(words)


def _default(cls: Any, name: str) -> Any:
    return cls.model_fields[name].default if name in cls.model_fields else None


def _text(value: Any) -> str:
    """Return a value as `--set` reads it: text, or TOML."""
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
