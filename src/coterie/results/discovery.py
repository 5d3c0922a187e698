"""Find runs in folders, give them distinct names, and group those that have the same clients."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.results.run import Run
from coterie.storage import atomic as disk
from coterie.storage.run_folder import EVENTS, SETTINGS

ITEM = "item.json"  # description of a table or figure, written by `coterie paper`
APART = ("val_share",)  # settings that do not change the clients: some methods need a validation part


def find_items(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the descriptions of papers' items in these folders and their direct subfolders."""
    items = []
    for path in paths:
        for file in sorted({*path.glob(ITEM), *path.glob(f"*/{ITEM}")}):
            items.append({**disk.read_json(file), "at": file.parent})
    return items


def find_runs(paths: Sequence[Path], complain: Callable[[str], None] | None = None) -> list[Run]:
    """Return the runs in or below these folders, or those of a paper's item, named and grouped.

    Damaged runs are left out and reported to `complain`. If it is not given, the first one raises CoterieError.
    """
    names: dict[Path, str] = {}
    for item in find_items(paths):
        names |= {(item["at"] / c["run"]).resolve(): c["row"] for c in reversed(item["cells"])}
    runs: dict[Path, Run] = {}
    for path in paths:
        if (path / ITEM).exists():
            item = find_items([path])[0]
            folders = list(dict.fromkeys((path / c["run"]).resolve() for c in item["cells"]))
        else:
            folders = run_folders(path)
        if not folders:
            raise CoterieError(f"there are no runs in {path}")
        for folder in folders:
            if folder.resolve() in runs:
                continue
            try:
                run = Run(folder, title=names.get(folder.resolve(), ""))
                _ = run.events
                runs[folder.resolve()] = run
            except CoterieError as e:
                if complain is None:
                    raise
                complain(str(e))
    return grouped(list(runs.values()))


def run_folders(path: Path) -> list[Path]:
    """Return the folder itself if it is a run's, otherwise the run folders below it.

    A folder with only one of the two files of a run counts, so that a lost file is noticed.
    """
    if any((path / name).exists() for name in (SETTINGS, EVENTS)):
        return [path]
    return sorted({p.parent for name in (SETTINGS, EVENTS) for p in path.rglob(name)})


def grouped(runs: Sequence[Run]) -> list[Run]:
    """Return the same runs with `group` set by their clients, and with titles that differ where settings do."""
    keys = {id(r): _clients(r) for r in runs}
    labels = _labels(list(dict.fromkeys(keys.values())))
    for r in runs:
        r.group = labels[keys[id(r)]]
    for mine in _by(runs, lambda r: (r.group, r.title)).values():
        apart = _differing([_flat(r) for r in mine])
        for r in mine if apart else ():
            r.base, r.apart = r.title, {k: _flat(r).get(k) for k in apart}
            r._title = run_name(r)
    return list(runs)


def run_name(run: Run, without: str = "") -> str:
    """Return the run's name with the settings that differ from other runs, leaving out one of them."""
    more = ", ".join(f"{k} {v}" for k, v in run.apart.items() if k != without)
    return (run.base or run.title) + (f" ({more})" if more else "")


def local_only_title(runs: Sequence[Run]) -> str | None:
    """Return the title of the Local-Only runs, which others are compared with."""
    return next((r.title for r in runs if r.settings["method"] == "local"), None)


def setting(run: Run, name: str) -> Any:
    """Return a setting of the run, of its federation or of its method."""
    flat = _flat(run)
    if name not in flat:
        raise CoterieError(f'{run.title} has no setting "{name}" in {run.path}')
    return flat[name]


def _flat(run: Run) -> dict[str, Any]:
    s = run.settings
    outer = {k: v for k, v in s.items() if k not in ("federation", "settings", "seed", "method")}
    return {**outer, **s["federation"], **run.description["method"]["settings"]}


def _clients(run: Run) -> str:
    """Return a key that is the same for runs with the same clients."""
    fed = {k: v for k, v in run.settings["federation"].items() if k not in APART}
    of_run = {"data": run.data, "task": run.task.name, "subset": run.settings["subset"]}
    return json.dumps({**of_run, **fed, "partition": run.partition}, sort_keys=True)


def _labels(keys: Sequence[str]) -> dict[str, str]:
    """Return a label by key: data and partition, and the settings that differ among keys with the same both."""
    parsed = {k: json.loads(k) for k in keys}
    out = {}
    for alike in _by(keys, lambda k: (parsed[k]["data"], parsed[k]["partition"])).values():
        apart = _differing([parsed[k] for k in alike])
        for k in alike:
            more = [f"{name} {parsed[k].get(name)}" for name in apart]
            out[k] = ", ".join([parsed[k]["data"], parsed[k]["partition"], *more])
    return out


def _differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(k for s in settings for k in s)
    return [n for n in names if len({json.dumps(s.get(n)) for s in settings}) > 1]


def _by(things: Sequence[Any], key: Any) -> dict[Any, list[Any]]:
    out: dict[Any, list[Any]] = defaultdict(list)
    for t in things:
        out[key(t)].append(t)
    return out
