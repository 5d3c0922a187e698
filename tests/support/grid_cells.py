"""Cells of a small grid."""

from pathlib import Path

from coterie.config import settings
from coterie.results.grid import Cell

SMALL = {"clients": 4, "rounds": 3, "model": "mlp", "epochs": 1, "eval_every": 3, "min_size": 5}


def cells(folder: Path, seeds: int = 3, **more: object) -> list[Cell]:
    return [Cell(settings(method="fedavg", seed=s, **{**SMALL, **more}), folder / f"s{s}") for s in range(seeds)]
