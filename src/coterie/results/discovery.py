"""Runs found in folders, with names that tell them apart and groups of those that share their clients."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.results.run import Run
from coterie.storage import atomic as disk
from coterie.storage.run_folder import EVENTS, SETTINGS

ITEM = "item.json"  # what `coterie paper` writes about a table or figure
APART = ("val_share",)  # some methods need a validation part; the clients are the same


def find_items(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Descriptions of the papers' items written in or right below these folders."""
    found = []
    for path in paths:
        for file in sorted({*path.glob(ITEM), *path.glob(f"*/{ITEM}")}):
            found.append({**disk.read_json(file), "at": file.parent})
    return found


def find_runs(paths: Sequence[Path], complain: Callable[[str], None] | None = None) -> list[Run]:
    """Runs in these folders, themselves or below them, or those of a paper's item, named and grouped.

    Damaged runs are left out, with a sentence for `complain`; without it the first one is raised.
    """
    names: dict[Path, str] = {}
    for item in find_items(paths):
        names |= {(item["at"] / c["run"]).resolve(): c["row"] for c in reversed(item["cells"])}
    found: dict[Path, Run] = {}
    for path in paths:
        if (path / ITEM).exists():
            item = find_items([path])[0]
            here = list(dict.fromkeys((path / c["run"]).resolve() for c in item["cells"]))
        else:
            here = run_folders(path)
        if not here:
            raise CoterieError(f"there are no runs in {path}")
        for p in here:
            if p.resolve() in found:
                continue
            try:
                run = Run(p, title=names.get(p.resolve(), ""))
                _ = run.events
                found[p.resolve()] = run
            except CoterieError as e:
                if complain is None:
                    raise
                complain(str(e))
    return grouped(list(found.values()))


def run_folders(path: Path) -> list[Path]:
    """The folder itself if it is a run's, else those below it; also if one of the files that tell it is lost."""
    if any((path / name).exists() for name in (SETTINGS, EVENTS)):
        return [path]
    return sorted({p.parent for name in (SETTINGS, EVENTS) for p in path.rglob(name)})


def grouped(runs: Sequence[Run]) -> list[Run]:
    """The same runs: `group` says whose clients they have, and titles differ where settings do."""
    keys = {id(r): _clients(r) for r in runs}
    labels = _labels(list(dict.fromkeys(keys.values())))
    for r in runs:
        r.group = labels[keys[id(r)]]
    for mine in _by(runs, lambda r: (r.group, r.title)).values():
        apart = _differing([_flat(r) for r in mine])
        for r in mine if apart else ():
            r.base, r.apart = r.title, {k: _flat(r).get(k) for k in apart}
            r._title = named(r)
    return list(runs)


def named(run: Run, without: str = "") -> str:
    """The run's name, leaving out one of the settings that tell it from others."""
    more = ", ".join(f"{k} {v}" for k, v in run.apart.items() if k != without)
    return (run.base or run.title) + (f" ({more})" if more else "")


def setting(run: Run, name: str) -> Any:
    """A setting of the run, of its federation or of its method."""
    flat = _flat(run)
    if name not in flat:
        raise CoterieError(f'{run.title} has no setting "{name}" in {run.path}')
    return flat[name]


def _flat(run: Run) -> dict[str, Any]:
    s = run.settings
    outer = {k: v for k, v in s.items() if k not in ("federation", "settings", "seed", "method")}
    return {**outer, **s["federation"], **run.description["method"]["settings"]}


def _clients(run: Run) -> str:
    fed = {k: v for k, v in run.settings["federation"].items() if k not in APART}
    return json.dumps(
        {"data": run.settings["data"], "task": run.task.name, "subset": run.settings["subset"], **fed}, sort_keys=True
    )


def _labels(keys: Sequence[str]) -> dict[str, str]:
    """Data and partition, and what else differs among those that share both."""
    parsed = {k: json.loads(k) for k in keys}
    out = {}
    for alike in _by(keys, lambda k: (parsed[k]["data"], parsed[k]["partition"])).values():
        apart = _differing([parsed[k] for k in alike])
        for k in alike:
            more = [f"{name} {parsed[k].get(name)}" for name in apart]
            out[k] = ", ".join([parsed[k]["data"], parsed[k]["partition"], *more])
    return out


def _differing(found: Sequence[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(k for f in found for k in f)
    return [n for n in names if len({json.dumps(f.get(n)) for f in found}) > 1]


def _by(things: Sequence[Any], key: Any) -> dict[Any, list[Any]]:
    out: dict[Any, list[Any]] = defaultdict(list)
    for t in things:
        out[key(t)].append(t)
    return out
