"""One self-contained HTML file about one or several runs: opens offline, on a phone too."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader

from coterie import disk
from coterie.errors import CoterieError
from coterie.runs.comparison import Comparison
from coterie.runs.found import find_items, find_runs
from coterie.runs.run import Run

VIEWS = {
    "personal/test/mean": "personal model, mean over clients",
    "personal/test/worst10": "personal model, worst tenth of the clients",
    "personal/test/pooled": "personal model, pooled over samples",
    "global/test/mean": "global model, mean over clients",
    "global/official/pooled": "global model, official test part",
    "participants/before/pooled": "participants before local training (pooled)",
    "participants/after/pooled": "participants after local training (pooled)",
}


def write(
    paths: Sequence[Path], out: Path, title: str = "", complain: Callable[[str], None] = lambda sentence: None
) -> Path:
    """The report of all runs found under `paths`, and of the papers' items written there.

    Damaged runs are left out and named, on the page and to `complain`."""
    damaged: list[str] = []
    runs = [r for r in find_runs(paths, damaged.append) if r.events]
    if not runs:
        raise CoterieError("; ".join(damaged) or "none of these runs has finished a round yet")
    for sentence in damaged:
        complain(sentence)
    html = render(runs, title, find_items(paths), [f"Left out: {sentence}." for sentence in damaged])
    try:
        disk.write_atomic(out, html.encode())
    except OSError as e:
        raise CoterieError(f"{out} cannot be written ({e.strerror or e})") from None
    return out


def render(
    runs: Sequence[Run], title: str = "", items: Sequence[dict[str, Any]] = (), warnings: Sequence[str] = ()
) -> str:
    """One part per group of runs that have the same clients; `items` are printed and measured tables."""
    groups = {g: Comparison([r for r in runs if r.group == g]) for g in dict.fromkeys(r.group for r in runs)}
    environment = Environment(loader=PackageLoader("coterie.report"), autoescape=True, trim_blocks=True)
    return environment.get_template("page.html").render(
        title=title or _title(runs, items),
        items=items,
        groups=[_part(name, comparison) for name, comparison in groups.items()],
        warnings=[*warnings, *_warnings(runs), *(w for c in groups.values() for w in c.warnings())],
        curves=_script({"views": VIEWS, "groups": {g: _lines(c) for g, c in groups.items()}}),
        clients=_script({g: _clients(c) for g, c in groups.items()}),
        settings=_settings(runs),
        seeds=sorted({r.settings["seed"] for r in runs}),
    )


def _part(name: str, comparison: Comparison) -> dict[str, Any]:
    readable = comparison.readable()
    partition = comparison.runs[0].description["partition"]
    return {
        "name": name or f"{partition['data']}, {partition['partition']}",
        "text": f"{partition['clients']} clients, {partition['dealt']:,} samples",
        "columns": ["method", *readable.columns],
        "rows": [[i, *row] for i, row in zip(readable.index, readable.values, strict=True)],
        "best": _best(comparison),
        "bytes": _bytes(comparison),
    }


def _title(runs: Sequence[Run], items: Sequence[dict[str, Any]] = ()) -> str:
    if len(items) == 1:
        return f"{items[0]['paper']} {items[0]['item']}: {items[0]['what']}"
    first = runs[0].settings
    data = sorted({r.settings["data"] for r in runs})
    schemes = sorted({r.settings["federation"]["partition"] for r in runs})
    scheme = first["federation"]["partition"] if len(schemes) == 1 else f"{len(schemes)} partitions"
    return f"{', '.join(data)}: {scheme}, {len({r.title for r in runs})} methods"


def _script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(disk.finite(value)).replace("</", "<\\/")


def _best(comparison: Comparison) -> dict[str, str]:
    """The method with the highest mean in each accuracy column, by column."""
    table = comparison.table()
    names = ("personal", "worst 10%", "pooled", "selected", "last 10", "best", "global", "trained", "adapted")
    return {n: str(table[n].astype(float).idxmax()) for n in names if n in table and table[n].notna().any()}


def _lines(comparison: Comparison) -> dict[str, dict[str, dict[str, list[float]]]]:
    """view -> method -> rounds, mean and spread over seeds, cumulative megabytes."""
    out: dict[str, dict[str, dict[str, list[float]]]] = {}
    for view in VIEWS:
        for title in comparison.titles:
            frames = [r.rounds for r in comparison.runs if r.title == title and view in r.rounds]
            if not frames:
                continue
            found = [f[view].dropna() for f in frames]
            rounds = sorted(set.intersection(*(set(f.index) for f in found)))
            if not rounds:
                continue
            values = np.array([[float(f[t]) for t in rounds] for f in found])
            sent = np.mean(
                [f.filter(like="bytes/").fillna(0).sum(axis=1).cumsum()[rounds].values for f in frames], axis=0
            )
            out.setdefault(view, {})[title] = {
                "x": [int(t) for t in rounds],
                "y": [round(100 * v, 3) for v in values.mean(0)],
                "s": [round(100 * v, 3) for v in values.std(0)],
                "mb": [round(float(v) / 1e6, 4) for v in sent],
            }
    return out


def _clients(comparison: Comparison) -> dict[str, Any]:
    """Per-client accuracy of the personal model, of the first seed: other seeds have other clients."""
    columns: dict[str, Any] = {}
    samples: dict[int, int] = {}
    seed = comparison.runs[0].settings["seed"]
    for title in comparison.titles:
        runs = [r for r in comparison.runs if r.title == title and r.settings["seed"] == seed]
        for r in runs[:1]:
            try:
                frame = r.clients()
            except CoterieError:  # not evaluated yet, or damaged: then a warning says so
                continue
            samples |= {int(i): int(n) for i, n in frame["samples"].items()}
            columns[title] = {int(i): round(100 * float(v), 2) for i, v in frame["personal/test"].items()}
    ids = sorted(samples)
    rows = [[i, samples[i], *(c.get(i) for c in columns.values())] for i in ids]
    return {"columns": ["client", "test samples", *columns], "rows": rows}


def _bytes(comparison: Comparison) -> list[list[str]]:
    rows = []
    for title in comparison.titles:
        summary = next(r for r in comparison.runs if r.title == title).summary()
        for link, total in sorted(summary["bytes"].items()):
            per_round = summary["bytes_per_round"].get(link, 0.0)
            rows.append([title, link.replace("/", ", "), f"{per_round / 1e6:,.3f}", f"{total / 1e6:,.2f}"])
    return rows


def _warnings(runs: Sequence[Run]) -> list[str]:
    out = []
    for r in runs:
        s = r.summary()
        name = ", ".join(w for w in (r.title, r.group, f"seed {r.settings['seed']}") if w)
        if not r.finished:
            out.append(f"{name}: stands at round {r.last_round} of {r.settings['rounds']}.")
        if s["nonfinite"]:
            out.append(f"{name}: {s['nonfinite']} uploads were not finite and were left out.")
        if s["failed"]:
            out.append(f"{name}: {s['failed']} times a sampled client failed.")
        if r.description["method"].get("certainty") == "C":
            out.append(f"{r.title} is reconstructed from its published description only.")
    return list(dict.fromkeys(out))


def _settings(runs: Sequence[Run]) -> list[list[str]]:
    """What all runs share, then what each method sets for itself."""
    common = {k: v for k, v in runs[0].settings.items() if k not in ("method", "settings", "seed", "federation")}
    shared = {k: v for k, v in common.items() if all(r.settings.get(k) == v for r in runs)}
    rows = [["all", k, json.dumps(v)] for k, v in shared.items()]
    rows += [["all", k, json.dumps(v)] for k, v in runs[0].settings["federation"].items()]
    rows += [["all", "parameters", f"{runs[0].description['parameters']:,}"]]
    seen = set()
    for r in runs:
        if r.title not in seen:
            seen.add(r.title)
            rows += [[r.title, k, json.dumps(v)] for k, v in r.description["method"]["settings"].items()]
            rows += [[r.title, k, json.dumps(v)] for k, v in common.items() if k not in shared for v in [r.settings[k]]]
    rows += [["all", k, str(v)] for k, v in runs[0].description["versions"].items()]
    return rows
