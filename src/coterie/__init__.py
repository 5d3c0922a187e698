"""Personalised federated learning: many clients train together, and each ends up with a model of its own.

import coterie
result = coterie.run("fedrep", "digits", clients=20, partition="dirichlet(0.1)", rounds=30)
result.summary()["personal"]["last"]; result.personal(7)
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.api import compare, open_run, resume, run, tune
    from coterie.core.method import Card, Download, Method, Phase, Settings, Upload
    from coterie.data.arrays import from_arrays, from_torch
    from coterie.engine.loop import Progress
    from coterie.errors import CoterieError
    from coterie.export.personal_model import load_model
    from coterie.models.per_client import PerClient

_HOME = {
    "compare": "api", "open_run": "api", "resume": "api", "run": "api", "tune": "api",
    "from_arrays": "data.arrays", "from_torch": "data.arrays",
    "CoterieError": "errors", "Progress": "engine.loop", "load_model": "export.personal_model",
    "Card": "core.method", "Download": "core.method", "Method": "core.method", "Phase": "core.method",
    "Settings": "core.method", "Upload": "core.method",
    "PerClient": "models.per_client",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loaded when first used, so that the command line starts quickly."""
    if name == "__version__":
        return version("coterie")
    if name in _HOME:
        return getattr(import_module(f"coterie.{_HOME[name]}"), name)
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = [
    "Card", "CoterieError", "Download", "Method", "PerClient", "Phase", "Progress", "Settings", "Upload", "compare",
    "from_arrays", "from_torch", "load_model", "open_run", "resume", "run", "tune",
]  # fmt: skip
