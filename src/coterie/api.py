"""The Python interface: run, compare, resume, open_run."""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from coterie.config import PUBLIC, RunSettings, given_reading, method_class, owner, settings, table
from coterie.config import engine as engine_of
from coterie.core.method import Method
from coterie.data.dataset import Dataset
from coterie.engine.personal_models import initial_values
from coterie.engine.provenance import origin
from coterie.engine.session import Factory, Objects, Session, execute, prepare, rebuild
from coterie.errors import CoterieError, unknown
from coterie.methods import canonical, controls, fields, known, resolve
from coterie.models.per_client import PerClient
from coterie.models.registry import WITH_NORM
from coterie.results.callbacks import OnRound, round_callbacks
from coterie.results.comparison import Comparison
from coterie.results.controls import CONTROLS, GENERAL
from coterie.results.discovery import APART
from coterie.results.grid import Cell, sweep
from coterie.results.run import Run
from coterie.results.search import Budget, Sampler, Tuning, make_trials, search
from coterie.storage.new_folder import fresh_folder

DataFunction = Callable[[], Dataset]
State = Literal["memory", "disk"]
Training = Literal["loop", "stack", "auto"]
log = logging.getLogger("coterie")


def run(
    method: str | type[Method] = "fedavg",
    data: str | Path | Dataset | DataFunction = "digits",
    model: str | nn.Module | Factory | PerClient | None = None,
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    state: State = "memory",
    runtime: str = "local",
    address: str | None = None,
    engine: Training = "loop",
    data_dir: str | Path | None = None,
    on_round: OnRound = (),
    track: str | None = None,
    **more: Any,
) -> Run:
    """Run one method and return the finished run.

    `more` takes any setting of the run, the federation or the method. `on_round` is called after every round with its
    Progress; if it returns True, the run stops there and can be resumed. `track`: tensorboard or mlflow.
    """
    named, objects = _named(data, model)
    how = engine_of(
        workers=workers, state=state, runtime=runtime, address=address, engine=engine, data_dir=_path(data_dir)
    )
    chosen = settings(**{**more, "method": method, **named})
    objects = replace(objects, method=None if isinstance(method, str) else method)
    session = prepare(chosen, how, objects, start=initial_values(chosen))
    for sentence in session.automatic_choices():
        log.info(sentence)
    folder = _path(out) or fresh_folder(f"{chosen.method}-{chosen.data}")
    _execute(session, folder, on_round, track)
    return _told(Run(folder, session))


def _execute(
    session: Session,
    folder: Path,
    on_round: OnRound,
    track: str | None,
    resume: bool = False,
    from_round: int | None = None,
) -> None:
    with round_callbacks(on_round, track, session, folder) as heard:
        execute(
            session,
            folder,
            resume=resume,
            tell=heard,
            say=log.warning,
            stopped=heard.stopped,
            from_round=from_round,
        )


def compare(
    methods: Sequence[str | type[Method]],
    data: str | Path | Dataset | DataFunction = "digits",
    model: str | Factory | None = None,
    *,
    against: str | Sequence[str] = (),
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    workers: int | None = None,
    engine: Training = "loop",
    data_dir: str | Path | None = None,
    **more: Any,
) -> Comparison:
    """Run several methods on the same clients; Local-Only is always included.

    `against`: "controls" adds what every method must beat and the controls the methods name themselves; other names
    are added as they are. `arena()` of what is returned has the differences to them.
    """
    how = engine_of(workers=workers, engine=engine, data_dir=_path(data_dir))
    folder = _path(out) or fresh_folder("compare")
    cells = comparison_cells(methods, data, model, seeds, folder, against, **more)
    status = sweep(cells, how, check=True)
    if status.failed:
        path, reason = next(iter(status.failed.items()))
        raise CoterieError(f"{path.name} failed: {reason}")
    found = Comparison([Run(c.out, objects=c.objects) for c in cells], asked(methods, against), rivals(against))
    for sentence in [*status.said, *found.warnings()]:
        log.warning(sentence)
    return found


def tune(
    methods: str | type[Method] | Sequence[str | type[Method]],
    data: str | Path | Dataset | DataFunction = "digits",
    model: str | Factory | None = None,
    *,
    space: Mapping[str, Sequence[Any]],
    rounds: int = 50,
    eta: int = 3,
    budget: int | None = None,
    minutes: float | None = None,
    trials: int | None = None,
    sampler: Sampler = "grid",
    seed: int = 0,
    out: str | Path | None = None,
    workers: int | None = None,
    data_dir: str | Path | None = None,
    **more: Any,
) -> Tuning:
    """Search settings and methods by successive halving on validation data, up to `rounds` for the best.

    `space` has a list of values for each setting. Of every `eta` trials one goes on to `eta` times as many rounds.
    `budget` bounds the rounds of all trials together, `minutes` the time, `trials` the number of combinations.
    The same call with the same `out` goes on where it was.
    """
    named, objects = _named(data, model)
    allowed = Budget(eta, budget, minutes, trials)
    chosen: list[str | type[Method]] = [methods] if isinstance(methods, str | type) else list(methods)
    folder = _path(out) or fresh_folder("tune")
    made = make_trials(chosen, space, folder, objects, rounds, allowed, seed=seed, **named, **more)
    how = engine_of(workers=workers, data_dir=_path(data_dir))
    found = search(made, folder, how, allowed, sampler, seed)
    for number, reason in found.failed.items():
        log.warning("%s failed: %s", found.trials[number].name, reason)
    return found


def comparison_cells(
    methods: Sequence[str | type[Method]],
    data: str | Path | Dataset | DataFunction,
    model: str | nn.Module | Factory | PerClient | None,
    seeds: int | Sequence[int],
    folder: Path,
    against: str | Sequence[str] = (),
    **more: Any,
) -> list[Cell]:
    """The runs of a comparison. Settings of run and federation go to all methods, others to the methods that have
    them; `method.setting` to that one and to the controls that it names itself and that are added here.
    """
    named, objects = _named(data, model)
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise CoterieError(f"methods = {methods!r} is invalid: compare takes a list of methods")
    for k, instead in (("method", "a list of methods"), ("seed", "seeds")):
        if k in more:
            raise CoterieError(f"compare takes {instead}; leave out {k}")
    names = [m if isinstance(m, str) else m.__name__ for m in methods if method_class(m)]
    chosen = dict(zip(names, methods, strict=True))
    if len({method_class(m) for m in methods}) < len(methods) or len(chosen) < len(methods):
        raise CoterieError(f"a method is named twice: {', '.join(names)}")
    if method_class("local") not in map(method_class, methods):
        chosen = {"local": "local", **chosen}
    added = _controls(chosen, against)
    chosen |= {name: name for name in added}
    readings = {name: given_reading(more, name, added.get(name, "")) for name in chosen}
    classes = {name: resolve(m, readings[name])[0] for name, m in chosen.items()}
    has = {name: fields(m, readings[name]) for name, m in chosen.items()}
    if model is None and any("bn" in m.needs for m in classes.values()):
        named["model"] = WITH_NORM  # all methods train the same model
    given = {**more, **table("federation", more.get("federation"))}
    if "public" not in given and any("public" in m.needs for m in classes.values()):
        more = {"public": PUBLIC, **more}  # all methods have the same clients
    shared = {k: v for k, v in more.items() if "." not in k}
    single = {k: v for k, v in more.items() if "." in k}
    for k in single:
        whose, _, setting = k.partition(".")
        if whose not in classes:
            raise unknown("method in the setting", whose, classes)
        if owner(setting, has[whose]) == "federation" and setting not in APART:
            raise CoterieError(f"{k} is invalid: {setting} is a setting of the federation, and all methods share it")
    some = {k for k in shared if k not in ("settings", "federation") and owner(k, *has.values()) == "method"}
    cells = []
    for name, method in chosen.items():
        mine = {k: v for k, v in shared.items() if k not in some or k in has[name]}
        for whose in (added.get(name, ""), name):  # a control is set as its method is, as far as it can be
            its = {k.removeprefix(f"{whose}."): v for k, v in single.items() if whose and k.startswith(f"{whose}.")}
            mine |= {k: v for k, v in its.items() if whose == name or _free(classes[name], has[name], k)}
        theirs = replace(objects, method=None if isinstance(method, str) else method)
        for seed in _seeds(seeds):
            cell = settings(**{**mine, "method": method, "seed": seed, **named})
            cells.append(Cell(cell, folder / f"{name}-s{seed}", theirs))
    return cells


def rivals(against: str | Sequence[str]) -> list[str]:
    """As a list."""
    return [against] if isinstance(against, str) and against else list(against)


def asked(methods: Sequence[str | type[Method]], against: str | Sequence[str]) -> list[str]:
    """The methods that are held against controls; empty if nobody asked for controls."""
    return [m if isinstance(m, str) else m.__name__ for m in methods] if against else []


def _controls(chosen: Mapping[str, str | type[Method]], against: str | Sequence[str]) -> dict[str, str]:
    """The methods to add, each with the one it is a control of (empty: of all); nobody is added twice."""
    names = rivals(against)
    wanted = {n.partition("/")[0]: "" for n in names if n != CONTROLS}
    if CONTROLS in names:
        wanted |= {n: "" for n in GENERAL if n in known()}
        wanted |= {c: name for name, m in chosen.items() for c in controls(m)}
    there = {method_class(m) for m in chosen.values()}
    out: dict[str, str] = {}
    for name, whose in wanted.items():
        if (cls := method_class(name)) not in there:
            there.add(cls)
            out[canonical(name)] = whose
    return out


def _free(cls: type[Method], has: Collection[str], setting: str) -> bool:
    """Can this setting of a method be set for its control too? Not what makes the control one."""
    if setting in has:
        return setting not in getattr(cls.Settings, "fixed", {})
    return setting in RunSettings.model_fields or setting in APART


def shared_choices(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each thing that one method needs and that all methods of a comparison therefore have."""
    needs: dict[str, list[str]] = {"bn": [], "public": []}
    for cell in {c.settings.method: c for c in cells}.values():
        cls = cell.objects.method or method_class(cell.settings.method)
        for need in needs.keys() & set(cls.needs):
            needs[need].append(cls.card.title or cls.__name__)
    found, s = [], cells[0].settings
    if needs["bn"] and s.model == WITH_NORM:
        found.append(f"all methods train the default model with batch norm, for the sake of {_names(needs['bn'])}")
    if needs["public"] and s.federation.public == PUBLIC:
        names = _names(needs["public"])
        found.append(f"{PUBLIC} items are set aside as a public set without labels, for the sake of {names}")
    return found


def _names(titles: Sequence[str]) -> str:
    return ", ".join(titles[:3]) + (f" and {len(titles) - 3} more" if len(titles) > 3 else "")


def _seeds(seeds: Any) -> list[int]:
    many = list(range(seeds)) if isinstance(seeds, int) else list(seeds) if isinstance(seeds, Iterable) else []
    if not many or not all(isinstance(s, int) for s in many) or len(set(many)) < len(many):
        raise CoterieError(f"seeds = {seeds!r} is invalid: it must be a number above 0 or a list of different seeds")
    return many


def resume(
    path: str | Path,
    *,
    rounds: int | None = None,
    from_round: int | None = None,
    method: type[Method] | None = None,
    data: Dataset | DataFunction | None = None,
    model: nn.Module | Factory | None = None,
    workers: int | None = None,
    state: State | None = None,
    runtime: str | None = None,
    address: str | None = None,
    data_dir: str | Path | None = None,
    on_round: OnRound = (),
    track: str | None = None,
) -> Run:
    """Resume an interrupted run; the result is bit-identical to that of an uninterrupted one. More `rounds` extend it,
    `from_round` goes back to the checkpoint of a round, if that is still kept.

    Your own method, data function or model is imported by its name if possible; otherwise pass the same again.
    """
    folder = _folder(path)
    how = engine_of(workers=workers, state=state, runtime=runtime, address=address, data_dir=_path(data_dir))
    session = rebuild(folder, how, _objects(method, data, model), rounds)
    _execute(session, folder, on_round, track, resume=True, from_round=from_round)
    return _told(Run(folder, session))


def open_run(
    path: str | Path,
    *,
    method: type[Method] | None = None,
    data: Dataset | DataFunction | None = None,
    model: nn.Module | Factory | None = None,
) -> Run:
    """Open the results of a run. `personal` needs your own objects again if they cannot be imported by name."""
    return Run(_folder(path), objects=_objects(method, data, model))


def _objects(
    method: type[Method] | None, data: Dataset | DataFunction | None, model: nn.Module | Factory | None
) -> Objects:
    made, whence = _made(data) if data is not None else (None, "")
    if not (made is None or isinstance(made, Dataset)):
        raise CoterieError(f"data = {data!r} is not possible: it is a data set or a function that makes one")
    return Objects(method, made, model, whence)


def _made(data: Any) -> tuple[Any, str]:
    """What a function of the user makes, and where it comes from; anything else as it is."""
    if isinstance(data, str | Path | Dataset) or not callable(data):
        return data, ""
    try:
        made = data()
    except CoterieError:
        raise
    except Exception as e:  # a user's code may raise anything
        raise CoterieError(f"the data function {origin(data)} failed: {type(e).__name__}: {e}") from e
    if not isinstance(made, Dataset):
        raise CoterieError(f"the data function {origin(data)} returned {type(made).__name__}; it must return a Dataset")
    return made, origin(data)


def _told(found: Run) -> Run:
    for sentence in found.warnings():
        log.warning(sentence)
    return found


def _named(
    data: str | Path | Dataset | DataFunction, model: str | nn.Module | Factory | PerClient | None
) -> tuple[dict[str, Any], Objects]:
    """Names for the settings, and the objects that stand behind names nobody could look up."""
    found, whence = _made(data)
    data = cast(str | Path | Dataset, found)
    own_data, own_model = isinstance(data, Dataset), not (model is None or isinstance(model, str))
    if not own_data and not isinstance(data, str | Path):
        raise CoterieError(f"data = {data!r} is invalid: it must be a name, a path or a Dataset")
    if own_model and not callable(model) and not isinstance(model, PerClient):
        raise CoterieError(
            f"model = {model!r} is invalid: it must be a name, an nn.Module or a function that returns one"
        )
    names = {
        "data": data.name if isinstance(data, Dataset) else os.fspath(data),
        "model": getattr(model, "__name__", type(model).__name__) if own_model else model,
    }
    own = data if isinstance(data, Dataset) else None
    return names, Objects(None, own, None if isinstance(model, str) else model, whence)


def _path(given: str | Path | None) -> Path | None:
    if not given:
        return None
    try:
        return Path(given).expanduser()
    except (TypeError, RuntimeError) as e:
        raise CoterieError(f"{given!r} is not a path: {e}") from None


def _folder(given: str | Path) -> Path:
    path = _path(given)
    if path is None:
        raise CoterieError("name the folder of a run")
    return path
