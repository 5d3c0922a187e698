"""What `coterie paper` leaves behind for an item: item.json, side.csv, side.md, figures and report.html."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from coterie import disk
from coterie.errors import CoterieError
from coterie.papers import presets, public, side
from coterie.papers.presets import Item
from coterie.report import figures, page
from coterie.runs.found import ITEM, find_runs
from coterie.runs.run import Run

VIEW = {  # the curve behind a statistic
    "participants_before_last10": "participants/before/pooled",
    "clients_mean_best": "personal/test/mean",
    "ac": "personal/test/mean",
    "gm": "personal/test/mean",
    "global_final": "global/official/pooled",
    "global_best": "global/official/pooled",
    "megabytes": "participants/before/pooled",
}

Cells = Mapping[tuple[str, str, int], Run]


def write(it: Item, runs: Cells, folder: Path, note: str) -> tuple[pd.DataFrame, list[str], list[str]]:
    """Everything about the finished runs; returns the table as text, the verdicts, and what could not be drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    if it.reads_only:
        table = public.frame(it, runs)
        text, verdicts = public.readable(table), [*public.verdicts(table), public.NOTE]
    else:
        table = side.frame(it, runs)
        text, verdicts = side.readable(table), side.verdicts(it, table)
    table.to_csv(folder / "side.csv", index=False)
    seeds = len({seed for _, _, seed in runs})
    head = f"{it.name}: {it.what}; {seeds} {'seed' if seeds == 1 else 'seeds'}; {note}."
    lines = [f"# {presets.title(it.paper)}", "", head, "", side.to_markdown(text), *(f"- {v}" for v in verdicts)]
    disk.write_atomic(folder / "side.md", ("\n".join(lines) + "\n").encode())
    described = {
        "paper": it.paper, "item": it.name, "title": presets.title(it.paper), "what": it.what, "note": note,
        "columns": [str(text.index.name), *map(str, text.columns)],
        "rows": [[str(i), *map(str, row)] for i, row in zip(text.index, text.values, strict=True)],
        "ours": [r for r in it.rows if presets.is_ours(it, r)], "verdicts": verdicts,
        "cells": [
            {"row": row, "column": column, "seed": seed, "run": os.path.relpath(run.path, folder)}
            for (row, column, seed), run in runs.items()
        ],
    }  # fmt: skip
    disk.write_json(folder / ITEM, described)
    missing = draw(it, find_runs([folder]), folder / "figures")
    page.write([folder], folder / "report.html")
    return text, verdicts, missing


def draw(it: Item, runs: Sequence[Run], folder: Path) -> list[str]:
    """The item's figures; a figure these runs cannot give (too few methods, data gone) is named, not fatal."""
    missing = []
    name = presets.statistic(it, it.columns[0])
    options: dict[str, Any] = {
        "view": VIEW.get(name, "personal/test/mean"), "axis": it.axis, "axis_label": it.axis_label,
        "value": side.STATISTICS[name], "label": LABELS.get(name, "accuracy (%)"),
    }  # fmt: skip
    for kind in it.figures:
        try:
            figures.save(figures.draw(kind, runs, **options), folder / kind)
        except CoterieError as e:
            missing.append(f"no figure {kind}: {e}")
    return missing


LABELS = {
    "participants_before_last10": "accuracy of participants\nbefore training, last ten rounds (%)",
    "clients_mean_best": "best round of the mean accuracy\nover clients (%)",
    "ac": "accuracy, mean over clients (%)",
    "global_final": "accuracy of the global model (%)",
}
