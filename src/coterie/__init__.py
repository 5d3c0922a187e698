"""Personalised federated learning: many clients train together, and each ends up with a model of its own.

import coterie
result = coterie.run("fedrep", "digits", clients=20, partition="dirichlet(0.1)", rounds=30)
result.summary()["personal"]["last"]; result.personal(7)
"""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.api import compare, open_run, resume, run, tune
    from coterie.core.method import Card, Download, Method, Phase, Settings, Upload
    from coterie.data.arrays import from_arrays, from_torch
    from coterie.data.frames import from_frame
    from coterie.engine.loop import Progress
    from coterie.errors import CoterieError
    from coterie.estimators import PersonalisedClassifier, PersonalisedRegressor
    from coterie.export.personal_model import load_model
    from coterie.models.per_client import PerClient

_HOME = {
    "compare": "api", "open_run": "api", "resume": "api", "run": "api", "tune": "api",
    "from_arrays": "data.arrays", "from_frame": "data.frames", "from_torch": "data.arrays",
    "CoterieError": "errors", "Progress": "engine.loop", "load_model": "export.personal_model",
    "Card": "core.method", "Download": "core.method", "Method": "core.method", "Phase": "core.method",
    "Settings": "core.method", "Upload": "core.method",
    "PerClient": "models.per_client",
    "PersonalisedClassifier": "estimators", "PersonalisedRegressor": "estimators",
}  # fmt: skip


# modules of version 0.1 and their places now
_MOVED = {
    "checkpoint": "storage.checkpoint", "codec": "engine.codec", "containment": "engine.fault_isolation",
    "disk": "storage.atomic", "edges": "core.edges", "evaluation": "engine.evaluation",
    "exchange": "engine.edge_steps", "folder": "storage.run_folder", "folders": "storage.run_folder",
    "ledger": "engine.ledger", "loop": "engine.loop", "messages": "engine.messages", "method": "core.method",
    "official": "engine.evaluation", "origins": "engine.provenance", "personal": "export.personal_model",
    "native": "train.native", "report": "results.report", "rng": "core.rng", "round": "engine.round", "runs": "results",
    "schema": "core.schema", "session": "engine.session", "tasks": "core.tasks",
    "tree": "core.tree",
}  # fmt: skip


class _MovedModules:
    """Import hook that says where a module of version 0.1 is now."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, rest = name.partition(".")
        if package == "coterie" and rest in _MOVED:
            raise ImportError(f"{name} of version 0.1 is coterie.{_MOVED[rest]} now", name=name)


sys.meta_path.append(_MovedModules)  # last: it is asked only for modules that do not exist


def __getattr__(name: str) -> Any:
    """Loaded when first used, so that the command line starts quickly."""
    if name == "__version__":
        return version("coterie")
    if name in _HOME:
        return getattr(import_module(f"coterie.{_HOME[name]}"), name)
    if name in _MOVED:
        raise ImportError(f"coterie.{name} of version 0.1 is coterie.{_MOVED[name]} now")
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = [
    "Card", "CoterieError", "Download", "Method", "PerClient", "PersonalisedClassifier", "PersonalisedRegressor",
    "Phase", "Progress", "Settings", "Upload", "compare", "from_arrays", "from_frame", "from_torch", "load_model",
    "open_run", "resume", "run", "tune",
]  # fmt: skip
