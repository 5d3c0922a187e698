"""Settings of a small federation, and its simulation."""

from pathlib import Path
from typing import Any

import coterie
from coterie.results.run import Run

SMALL: dict[str, Any] = {
    "data": "digits", "subset": 400, "model": "mlp", "partition": "dirichlet(0.5)", "epochs": 1, "join": 1.0,
}  # fmt: skip


def simulated(folder: Path, method: str, clients: int, given: dict[str, Any]) -> Run:
    more = dict(given)
    return coterie.run(method, more.pop("data"), more.pop("model"), out=folder, workers=1, clients=clients, **more)
