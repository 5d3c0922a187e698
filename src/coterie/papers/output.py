"""Write the files of an item of `coterie paper`: item.json, side.csv, side.md, figures and report.html."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from coterie.errors import CoterieError
from coterie.papers import presets, printed_values, public_logs
from coterie.papers.presets import Item
from coterie.results.discovery import ITEM, find_runs
from coterie.results.report import figures, page
from coterie.results.run import Run
from coterie.results.tables import markdown_table
from coterie.storage import atomic as disk

_CURVE = {  # the curve of a statistic
    "participants_before_last10": "participants/before/pooled",
    "participants_before_last20": "participants/before/pooled",
    "clients_mean_best": "personal/test/mean",
    "ac": "personal/test/mean",
    "gm": "personal/test/mean",
    "global_final": "global/official/pooled",
    "global_best": "global/official/pooled",
    "megabytes": "participants/before/pooled",
}

Cells = Mapping[tuple[str, str, int], Run]


def write_item(
    it: Item, runs: Cells, folder: Path, note: str, measured: str = ""
) -> tuple[pd.DataFrame, list[str], list[str]]:
    """Write all files about the finished runs; return the table as text, the verdicts, and the missing figures.

    `measured` says how many printed cells are measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if it.reads_only:
        table = public_logs.compare_with_logs(it, runs)
        text, verdicts = public_logs.log_text(table), [*public_logs.log_verdicts(table), public_logs.NOTE]
    else:
        table = printed_values.compare_with_printed(it, runs)
        text, verdicts = printed_values.printed_text(table), printed_values.printed_verdicts(it, table)
        verdicts += [measured] if measured else []
        verdicts += [f"chosen by us, as the paper does not state it: {presets.settings_text(it.unstated)}"]
    table.to_csv(folder / "side.csv", index=False)
    seeds = len({seed for _, _, seed in runs})
    head = f"{it.name}: {it.what}; {seeds} {'seed' if seeds == 1 else 'seeds'}; {note}."
    lines = [f"# {presets.title(it.paper)}", "", head, "", markdown_table(text), *(f"- {v}" for v in verdicts)]
    disk.write_atomic(folder / "side.md", ("\n".join(lines) + "\n").encode())
    described = {
        "paper": it.paper, "item": it.name, "title": presets.title(it.paper), "what": it.what, "note": note,
        "columns": [str(text.index.name), *map(str, text.columns)],
        "rows": [[str(i), *map(str, row)] for i, row in zip(text.index, text.values, strict=True)],
        "statistics": {} if it.reads_only else statistics_in_words(it),
        "ours": [r for r in it.rows if presets.is_ours(it, r)], "verdicts": verdicts,
        "cells": [
            {"row": row, "column": column, "seed": seed, "run": os.path.relpath(run.path, folder)}
            for (row, column, seed), run in runs.items()
        ],
    }  # fmt: skip
    disk.write_json(folder / ITEM, described)
    missing = draw_figures(it, find_runs([folder]), folder / "figures")
    page.write_report([folder], folder / "report.html")
    return text, verdicts, missing


_STATISTIC_WORDS = {  # description of the measured numbers on the page
    "participants_before_last10": "the accuracy of participants before training, mean of the last ten rounds",
    "participants_before_last20": "the accuracy of participants before training, mean of the last twenty rounds",
    "clusters": "the mean over clusters of their clients' mean accuracy at the last evaluation",
    "clients_with_fc1": "the number of clients that keep fc1",
    "clients_with_fc2": "the number of clients that keep fc2",
    "clients_with_classifier": "the number of clients that keep the classifier",
    "clients_mean_best": "the mean accuracy over clients at its best round",
    "ac": "the mean accuracy over clients at the last evaluation",
    "gm": "the accuracy of the global model on the official test part; without one, of the mean of the personal models",
    "pm_v": "the personal models' accuracy on the official test part, classes of their training data only, PM(V)",
    "pm_l": "the personal models' accuracy on the official test part, classes weighted as in training, PM(L)",
    "pm_v_trained": "PM(V) of the personal models after local training, on the official test part",
    "pm_l_trained": "PM(L) of the personal models after local training, on the official test part",
    "global_final": "the accuracy of the global model on the official test part after the last round",
    "global_best": "the accuracy of the global model on the official test part, best round",
    "ac_edge": "the mean accuracy over clients of their edges' models after the last round",
    "global_loss": "the loss of the global model on the official test part after the last round",
    "train_loss_final": "the loss of the participants' models on their training data in the last round",
    "train_loss_best": "the loss of the participants' models on their training data in the round of the best accuracy",
    "clustering_round": "the round that ended with clusters",
    "aun_rise": "AUN of the round after the clusters were made, divided by AUN of the round before",
    "ahead_from": "the round from which the global model stays ahead of the rivals",
    "lead": "the lead of the global model over the best rival after the last round, in points",
    "rounds_to_70": "the rounds until 70 percent",
    "rounds_to_75": "the rounds until 75 percent",
    "megabytes": "the megabytes that clients send and receive",
}


def statistics_in_words(it: Item) -> dict[str, list[str]]:
    """Return statistic in words -> columns, or rows with a statistic of their own, that show it."""
    out: dict[str, list[str]] = {}
    for column in it.columns:
        name = presets.statistic(it, column)
        words = "the accuracy of one client" if name.startswith("client_") else _STATISTIC_WORDS.get(name, name)
        out.setdefault(words, []).append(column)
    for row in it.rows:
        name = presets.statistic(it, it.columns[0], row)
        if name != presets.statistic(it, it.columns[0]):
            out.setdefault(_STATISTIC_WORDS.get(name, name), []).append(row)
    return out


def values_of_run(it: Item, run: Run) -> list[str]:
    """Return a sentence for each column of an item with one row: the paper's statistic of this run, and as printed."""
    words = {column: text for text, columns in statistics_in_words(it).items() for column in columns}
    out = []
    for column in it.columns:
        name = words.get(it.rows[0], words[column])
        one = presets.narrow(it, [column], [])
        try:
            table = printed_values.compare_with_printed(one, {(it.rows[0], column, 0): run})
        except (CoterieError, KeyError):
            out.append(f"{column}: this run lacks {name}, which the paper reports")
            continue
        for _, row in printed_values.printed_text(table).iterrows() if len(table) else ():
            printed = f"the paper prints {row['printed']}" if row["printed"] else "the paper prints no value"
            measured = f"{row['measured']} is {name}" if row["measured"] else f"{row['remark']} ({name})"
            out.append(f"{column}: {measured}; {printed}")
    return out


def draw_figures(it: Item, runs: Sequence[Run], folder: Path) -> list[str]:
    """Draw the item's figures; return a message for each that these runs do not allow."""
    missing = []
    name = presets.statistic(it, it.columns[0])
    options: dict[str, Any] = {
        "view": _CURVE.get(name, "personal/test/mean"), "axis": it.axis, "axis_label": it.axis_label,
        "value": printed_values.STATISTICS.get(name), "label": _LABELS.get(name, "accuracy (%)"),
    }  # fmt: skip
    for kind in it.figures:
        try:
            figures.save_figure(figures.draw(kind, runs, **options), folder / kind)
        except CoterieError as e:
            missing.append(f"no figure {kind}: {e}")
    return missing


_LABELS = {
    "participants_before_last10": "accuracy of participants\nbefore training, last ten rounds (%)",
    "participants_before_last20": "accuracy of participants\nbefore training, last twenty rounds (%)",
    "clients_mean_best": "best round of the mean accuracy\nover clients (%)",
    "ac": "accuracy, mean over clients (%)",
    "global_final": "accuracy of the global model (%)",
}
