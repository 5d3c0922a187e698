"""The same things from Python: run, compare, resume, open_run."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from coterie.config import Engine, RunSettings, settings
from coterie.data.dataset import Dataset
from coterie.errors import CoterieError, unknown
from coterie.folders import fresh_folder
from coterie.method import Method
from coterie.methods import find
from coterie.runs.comparison import Comparison
from coterie.runs.run import Run
from coterie.runs.sweep import Cell, sweep
from coterie.session import Factory, Objects, execute, prepare, rebuild

State = Literal["memory", "disk"]
Where = Literal["local", "ray"]
Training = Literal["loop", "stack", "auto"]


def run(
    method: str | type[Method] = "fedavg",
    data: str | Dataset = "digits",
    model: str | nn.Module | Factory | None = None,
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    state: State = "memory",
    runtime: Where = "local",
    address: str | None = None,
    engine: Training = "loop",
    data_dir: str | Path | None = None,
    **more: Any,
) -> Run:
    """One run; `more` are settings of the run, of the federation or of the method. Returns what it wrote, readable."""
    named, objects = _named(method, data, model)
    place = Path(data_dir) if data_dir else None
    how = Engine(workers=workers, state=state, runtime=runtime, address=address, engine=engine, data_dir=place)
    chosen = _settings(method, named, more)
    session = prepare(chosen, how, method=objects.method, dataset=objects.dataset, model=objects.model)
    folder = Path(out) if out else fresh_folder(f"{named['method']}-{named['data']}")
    execute(session, folder)
    return Run(folder, session)


def compare(
    methods: Sequence[str | type[Method]],
    data: str | Dataset = "digits",
    model: str | Factory | None = None,
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    workers: int | None = None,
    engine: Training = "loop",
    data_dir: str | Path | None = None,
    **more: Any,
) -> Comparison:
    """Several methods on the same clients; Local-Only is always among them."""
    how = Engine(workers=workers, engine=engine, data_dir=Path(data_dir) if data_dir else None)
    folder = Path(out) if out else fresh_folder("compare")
    cells = comparison_cells(methods, data, model, seeds, folder, **more)
    status = sweep(cells, how)
    if status.failed:
        path, reason = next(iter(status.failed.items()))
        raise CoterieError(f"{path.name} failed: {reason}")
    return Comparison([Run(c.out) for c in cells])


def comparison_cells(
    methods: Sequence[str | type[Method]],
    data: str | Dataset,
    model: str | nn.Module | Factory | None,
    seeds: int | Sequence[int],
    folder: Path,
    **more: Any,
) -> list[Cell]:
    """The runs of a comparison. A setting that only some of the methods have goes to those; `method.setting` to one."""
    named = [(m, _named(m, data, model)) for m in methods]
    if not any(n["method"] == "local" for _, (n, _) in named):
        named.insert(0, ("local", _named("local", data, model)))
    everybody = {k for m, _ in named for k in _class(m).Settings.model_fields}
    marked = {k: v for k, v in more.items() if "." in k}
    for k in marked:
        if k.partition(".")[0] not in [n["method"] for _, (n, _) in named]:
            raise unknown("method in the setting", k.partition(".")[0], [n["method"] for _, (n, _) in named])
    cells = []
    for m, (names, objects) in named:
        own = _class(m).Settings.model_fields
        shared = {k: v for k, v in more.items() if k not in marked and (k not in everybody or k in own)}
        mark = f"{names['method']}."
        mine = shared | {k.removeprefix(mark): v for k, v in marked.items() if k.startswith(mark)}
        for seed in range(seeds) if isinstance(seeds, int) else seeds:
            chosen = _settings(m, names, {**mine, "seed": seed})
            cells.append(Cell(chosen, folder / f"{names['method']}-s{seed}", objects))
    return cells


def resume(
    path: str | Path,
    *,
    workers: int | None = None,
    runtime: Where = "local",
    address: str | None = None,
    data_dir: str | Path | None = None,
) -> Run:
    """Continue a run that was interrupted, to the same bits as one that was not."""
    folder = Path(path)
    place = Path(data_dir) if data_dir else None
    session = rebuild(folder, Engine(workers=workers, runtime=runtime, address=address, data_dir=place))
    execute(session, folder, resume=True)
    return Run(folder, session)


def open_run(path: str | Path) -> Run:
    return Run(path)


def _class(method: str | type[Method]) -> type[Method]:
    return find(method) if isinstance(method, str) else method


def _settings(method: str | type[Method], named: dict[str, Any], more: dict[str, Any]) -> RunSettings:
    """Checked settings; those of a class, which need not have a registered name, are sorted out here."""
    if isinstance(method, str):
        return settings(**named, **more)
    fields = method.Settings.model_fields
    own = {**more.get("settings", {}), **{k: v for k, v in more.items() if k in fields}}
    rest = {k: v for k, v in more.items() if k not in fields and k != "settings"}
    chosen = settings(**{**named, "method": "fedavg"}, **rest)
    return chosen.model_copy(update={"method": named["method"], "settings": own})


def _named(
    method: str | type[Method], data: str | Dataset, model: str | nn.Module | Factory | None
) -> tuple[dict[str, Any], Objects]:
    """Names for the settings, and the objects that stand behind names nobody could look up."""
    objects = Objects(
        None if isinstance(method, str) else method,
        None if isinstance(data, str) else data,
        None if model is None or isinstance(model, str) else model,
    )
    names: dict[str, Any] = {
        "method": method if isinstance(method, str) else method.__name__,
        "data": os.fspath(data) if isinstance(data, str) else data.name,
        "model": model if model is None or isinstance(model, str) else getattr(model, "__name__", type(model).__name__),
    }
    return names, objects
