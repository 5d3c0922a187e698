"""The origin of a run: its settings, the command that repeats it, and the dates of its files."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from coterie.results.command_line import run_command
from coterie.results.run import Run
from coterie.storage.run_folder import EVENTS, SETTINGS


def command(run: Run) -> str:
    """Return the command that repeats the run; empty if it used Python objects of the user or data of devices."""
    if run.description.get("objects") or run.own_data:
        return ""
    return run_command(run.settings, run.description.get("data_dir"))


def dates(runs: Sequence[Run]) -> str:
    """Return the time span of the runs' files, by the clock of this machine."""
    times = [
        datetime.fromtimestamp((r.path / name).stat().st_mtime)
        for r in runs
        for name in (SETTINGS, EVENTS)
        if (r.path / name).exists()
    ]
    if not times:
        return ""
    first, last = (f"{t:%Y-%m-%d %H:%M}" for t in (min(times), max(times)))
    return first if first == last else f"{first} to {last[11:] if first[:10] == last[:10] else last}"


def settings_table(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the settings of all runs, then those of each method, and a command per method."""
    common = {k: v for k, v in runs[0].settings.items() if k not in ("method", "settings", "seed", "federation")}
    shared = {k: v for k, v in common.items() if all(r.settings.get(k) == v for r in runs)}
    rows = [["all", k, json.dumps(v)] for k, v in shared.items()]
    federation = runs[0].settings["federation"]
    alike = {k: v for k, v in federation.items() if all(r.settings["federation"].get(k) == v for r in runs)}
    rows += [["all", k, json.dumps(v)] for k, v in alike.items()]
    rows += [["all", "parameters of the model", f"{runs[0].description['parameters']:,}"]]
    seen = set()
    for r in runs:
        if (r.title, r.group) in seen:
            continue
        seen.add((r.title, r.group))
        own = {k: v for k, v in common.items() if k not in shared}
        own |= {k: v for k, v in federation.items() if k not in alike}
        name = f"{r.title}, {r.group}" if len({x.group for x in runs}) > 1 else r.title
        rows += [[name, k, json.dumps(v)] for k, v in r.description["method"]["settings"].items()]
        rows += [[name, k, json.dumps(r.settings.get(k, r.settings["federation"].get(k)))] for k in own]
    rows += [["all", k, str(v)] for k, v in runs[0].description["versions"].items()]
    first = {(r.title, r.group): r for r in reversed(runs)}
    return {"rows": rows, "commands": [c for r in reversed(first.values()) if (c := command(r))]}
