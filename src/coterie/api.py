"""The Python interface: run, resume, open_run, compare, tune. The command line calls these functions."""

import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from coterie.config import PUBLIC, Engine, RunSettings, given_reading, method_class, owner, settings, table
from coterie.config import engine as engine_of
from coterie.core.method import Method
from coterie.core.metrics import metric_key
from coterie.data.arrays import with_partition
from coterie.data.dataset import Dataset
from coterie.data.sources import call_data_function, load_dataset
from coterie.data.table import TableColumns
from coterie.engine.loop import Progress
from coterie.engine.personal_models import initial_values
from coterie.engine.provenance import origin
from coterie.engine.session import Callbacks, Factory, Objects, Session, execute, prepare, rebuild
from coterie.errors import CoterieError, unknown
from coterie.methods import controls, fields, method_names, registered_name, resolve
from coterie.models.per_client import PerClient
from coterie.models.registry import WITH_NORM
from coterie.papers.protocol import PaperRun, paper_run
from coterie.progress import wanted as progress_wanted
from coterie.progress import with_bar, with_rounds
from coterie.results.callbacks import OnRound, RoundCallbacks, checked_callbacks, round_callbacks, tracker_package
from coterie.results.comparison import Comparison, check_columns
from coterie.results.controls import CONTROLS, GENERAL, ControlTable
from coterie.results.discovery import APART
from coterie.results.equal_budget import equalised, matched_controls
from coterie.results.grid import Cell, SweepStatus, sweep
from coterie.results.run import Run
from coterie.results.search import Budget, Sampler, Tuning, make_trials, search
from coterie.results.tables import FORMATS
from coterie.storage.atomic import write_atomic
from coterie.storage.run_folder import fresh_folder
from coterie.train.optimisers import named_optimiser

DataFunction = Callable[[], Dataset]
log = logging.getLogger("coterie")
_TO_LOG = Callbacks(on_info=log.info, on_warning=log.warning)


@contextmanager
def _torch_as_found() -> Iterator[None]:
    """Restore PyTorch's number of threads and its random state afterwards."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


@_torch_as_found()
def run(
    method: str | type[Method] = "fedavg",
    data: str | Path | Dataset | DataFunction = "",
    model: str | nn.Module | Factory | PerClient | None = None,
    *,
    as_in_paper: bool | str = False,
    out: str | Path | None = None,
    on_round: OnRound = (),
    track: str | None = None,
    progress: bool | None = None,
    callbacks: Callbacks | None = None,
    **more: Any,
) -> Run:
    """Run one method and return the finished run. The default data set is "digits".

    `more` takes any setting of the run, the federation or the method, and how the run is computed: `workers`, `state`
    (memory or disk), `runtime`, `address`, `engine` (loop, stack or auto), `device` (cpu, cuda, "cuda:0,cuda:1", auto,
    ...), `keep` and `data_dir`. `on_round` is called after every round with its Progress; if it returns True, the run
    stops there and can be resumed. `track`: tensorboard, mlflow or wandb. `progress` shows a bar: by default on a
    terminal and in a notebook, never with False. With `callbacks`, messages go to these functions instead of the logger
    "coterie". `as_in_paper` takes the settings of one run of the method's paper, or of the paper that it names
    ("fedcpmd"), from the first table with the method. Settings that are given override them, and every difference is
    reported.
    """
    default = isinstance(data, str) and not data
    names, objects = _named(_partitioned("digits" if default else data, more), model)
    how, functions = _engine(more), _own_functions(more)
    if as_in_paper:
        given = {**more, **({} if model is None else {"model": names["model"]})}
        in_paper = _paper_run(method, as_in_paper, None if default else names["data"], given, how, callbacks)
        chosen = in_paper.settings
    else:
        in_paper, chosen = None, settings(**{**more, "method": method, **names})
    objects = replace(objects, method=None if isinstance(method, str) else method, functions=functions)
    session = prepare(chosen, how, objects, start=initial_values(chosen))
    for sentence in session.automatic_choices():
        _checked(callbacks).on_info(sentence)
    folder = _path(out) or fresh_folder(f"{chosen.method}-{chosen.data}")
    result = _execute(session, folder, on_round, track, callbacks, progress)
    if in_paper and result.finished:
        from coterie.papers.output import values_of_run  # loads matplotlib

        for sentence in values_of_run(in_paper.item, result):
            _checked(callbacks).on_info(sentence)
    return result


def _paper_run(
    method: str | type[Method],
    paper: bool | str,
    data: str | None,
    given: Mapping[str, Any],
    how: Engine,
    callbacks: Callbacks | None,
) -> PaperRun:
    """Return a run as in a paper, after reporting what differs."""
    if not isinstance(method, str):
        raise CoterieError("as_in_paper takes the name of a method, because papers have no classes of your own")
    found = paper_run(method, None if paper is True else str(paper), data, given, how.data_dir)
    (callbacks or _TO_LOG).on_info(found.note)
    return found


@_torch_as_found()
def resume(
    path: str | Path,
    *,
    rounds: int | None = None,
    from_round: int | None = None,
    method: type[Method] | None = None,
    data: Dataset | DataFunction | None = None,
    model: nn.Module | Factory | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    on_round: OnRound = (),
    track: str | None = None,
    progress: bool | None = None,
    callbacks: Callbacks | None = None,
    **how: Any,
) -> Run:
    """Resume an interrupted run; the result is bit-identical to that of an uninterrupted one.

    More `rounds` extend the run; `from_round` goes back to the checkpoint of a round, if it is still kept. Your own
    method, data function or model is imported by its name if possible; otherwise pass the same object again, and your
    own functions by setting, such as functions={"optimizer": make, "metrics": [gap]}. `how` takes the options of `run`
    about how a run is computed, such as `workers`.
    """
    folder, engine = _folder(path), _engine(how)
    for name in how:
        raise unknown("option", name, [*Engine.model_fields, *inspect.signature(resume).parameters])
    objects = replace(_objects(method, data, model), functions=_own_functions(dict(functions or {})))
    session = rebuild(folder, engine, objects, rounds)
    return _execute(session, folder, on_round, track, callbacks, progress, resume=True, from_round=from_round)


def open_run(
    path: str | Path,
    *,
    method: type[Method] | None = None,
    data: Dataset | DataFunction | None = None,
    model: nn.Module | Factory | None = None,
) -> Run:
    """Open the results of a run. `personal` needs your own objects again if they cannot be imported by name."""
    return Run(_folder(path), objects=_objects(method, data, model))


def _checked(callbacks: Callbacks | None) -> Callbacks:
    if not isinstance(callbacks, Callbacks | None):
        raise CoterieError(f"callbacks = {callbacks!r} is invalid: it must be a coterie.engine.session.Callbacks")
    return callbacks or _TO_LOG


def _execute(
    session: Session,
    folder: Path,
    on_round: OnRound,
    track: str | None,
    callbacks: Callbacks | None,
    progress: bool | None = None,
    resume: bool = False,
    from_round: int | None = None,
) -> Run:
    given = _checked(callbacks)
    for sentence in session.warnings():
        given.on_warning(sentence)
    with (
        with_bar(given, progress_wanted(progress, callbacks)) as (shown, bar),
        round_callbacks(on_round, track, session, folder) as after_round,
    ):
        given = with_rounds(shown, bar)
        given.on_start(session.method.card.title, session.settings.rounds)

        def on_each_round(done: Progress) -> None:
            given.on_round(done)
            after_round(done)

        def should_stop() -> bool:
            return given.should_stop() or after_round.stopped()

        both = replace(given, on_round=on_each_round, should_stop=should_stop)
        execute(session, folder, both, resume=resume, from_round=from_round)
    finished = Run(folder, session)
    if callbacks is None:  # otherwise the caller shows them with the results
        for sentence in finished.warnings():
            if sentence not in session.warnings():  # said before
                log.warning(sentence)
    return finished


@_torch_as_found()
def compare(
    methods: Sequence[str | type[Method]],
    data: str | Path | Dataset | DataFunction = "digits",
    model: str | Factory | None = None,
    *,
    against: str | Sequence[str] = (),
    equal: str = "",
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    on_round: OnRound = (),
    track: str | None = None,
    progress: bool | None = None,
    callbacks: Callbacks | None = None,
    **more: Any,
) -> Comparison:
    """Run several methods on the same clients; Local-Only is always included.

    The folder `out` gets the runs, table.csv, table.md and table.tex, and with `against` the same files of `arena`. A
    repeated call with the same `out` continues.

    `against`: "controls" adds the controls that every method must beat and those that the methods declare, and runs
    Local-Only and FedAvg + fine-tuning also with as much training as a method that trains more or less. Other names are
    added as they are. The differences are in `arena()` of the returned comparison. `equal`: "steps", "samples", "bytes"
    or "time" gives every method as much of it as FedAvg (or, without FedAvg, Local-Only) has in `rounds` rounds. `more`
    takes settings, and `workers`, `state`, `engine`, `device`, `keep` and `data_dir` as in `run`. All methods have one
    rule of `use`: the model that a client receives, unless it is given; `use="own"` leaves each method its own rule.
    `on_round` is called after every round of every run; `run` of its Progress names the run, such as "fedrep-s0". If it
    returns True, all runs stop after their present rounds, and the table has those that have finished. `track`,
    `progress` and `callbacks` are those of `run`.
    """
    given = _checked(callbacks)
    with with_bar(given, progress_wanted(progress, callbacks)) as (shown, bar):
        outcome = run_comparison(
            methods, data, model, against=against, equal=equal, seeds=seeds, out=out, on_round=on_round, track=track,
            callbacks=shown, on_status=lambda s: bar.update(s.done(), s.running()), **more,
        )  # fmt: skip
    for path, reason in outcome.status.failed.items():
        raise CoterieError(f"{path.name} failed: {reason}")
    stopped = [path.name for path, done in outcome.status.rounds.items() if done < outcome.status.planned[path]]
    pause = f"stopped before the end of {', '.join(stopped)}; to continue, compare with out={str(outcome.folder)!r}"
    if outcome.comparison is None:
        raise CoterieError(f"{pause}; no run has finished")
    for sentence in [*outcome.status.said, *outcome.comparison.warnings(), *([pause] if stopped else [])]:
        given.on_warning(sentence)
    return outcome.comparison


@dataclass(frozen=True)
class ComparisonOutcome:
    """The runs of a comparison, some of which may have failed or not finished."""

    folder: Path
    status: SweepStatus
    comparison: Comparison | None  # comparison of the finished runs; None if no run has finished
    arena: ControlTable | None = None  # differences to the controls, if some were asked for


def run_comparison(
    methods: Sequence[str | type[Method]],
    data: str | Path | Dataset | DataFunction = "digits",
    model: str | Factory | None = None,
    *,
    against: str | Sequence[str] = (),
    equal: str = "",
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    also: Sequence[str] = (),
    on_round: OnRound = (),
    track: str | None = None,
    callbacks: Callbacks = _TO_LOG,
    on_status: Callable[[SweepStatus], object] = lambda status: None,
    **more: Any,
) -> ComparisonOutcome:
    """Run the methods of a comparison as `compare` does, and return what finished even if some runs failed.

    `also` names further columns. `on_status` is called with the progress of all runs.
    """
    check_columns(also)
    how = _engine(more, "workers", "state", "engine", "device", "keep", "data_dir")
    calls = checked_callbacks(on_round)
    calls += [callbacks.on_round] if callbacks.on_round is not Callbacks.on_round else []
    after_round = RoundCallbacks(calls)
    if track is not None:
        tracker_package(track)
    folder = _path(out) or fresh_folder("compare")
    cells = comparison_cells(methods, data, model, seeds, folder, against, **more)
    for sentence in shared_choices(cells):
        callbacks.on_info(sentence)
    if equal:
        cells = equalised(cells, folder, how, equal, callbacks.should_stop)
    callbacks.on_start("compare", sum(c.settings.rounds for c in cells))

    def should_stop() -> bool:
        return callbacks.should_stop() or after_round.stopped()

    asks = after_round if calls else None  # no calls: runs do not wait for this process after every round
    status = sweep(cells, how, on_status, should_stop, check=True, on_round=asks, track=track)
    runs = _finished(cells, status)
    if CONTROLS in _rivals(against) and (more_cells := matched_controls(runs, cells)):
        also_run = sweep(more_cells, how, on_status, should_stop, on_round=asks, track=track)
        status.failed |= also_run.failed
        status.said += also_run.said
        status.rounds |= also_run.rounds
        status.planned |= also_run.planned
        runs += _finished(more_cells, also_run, named=True)
    asked = [m if isinstance(m, str) else m.__name__ for m in methods] if against else []
    if not runs:
        return ComparisonOutcome(folder, status, None)
    comparison = Comparison(runs, asked, _rivals(against), also=also)
    arena = comparison.arena() if against else None
    for name, shown in (("table", comparison), ("arena", arena)):
        for kind, suffix in FORMATS.items() if shown is not None else ():
            write_atomic(folder / f"{name}.{suffix}", getattr(shown, kind)().encode())
    return ComparisonOutcome(folder, status, comparison, arena)


def _finished(cells: Sequence[Cell], status: SweepStatus, named: bool = False) -> list[Run]:
    """Return the runs that finished; `named`: their titles tell the number of rounds."""
    runs = [Run(c.out, objects=c.objects) for c in cells if c.out not in status.failed and c.finished()]
    return [Run(r.path, title=f"{r.title} ({r.settings['rounds']} rounds)") for r in runs] if named else runs


@_torch_as_found()
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
    progress: bool | None = None,
    callbacks: Callbacks | None = None,
    on_status: Callable[[SweepStatus], object] = lambda status: None,
    **more: Any,
) -> Tuning:
    """Search settings and methods by successive halving on validation data, up to `rounds` for the best.

    `space` has a list of values for each setting. One of every `eta` trials is promoted to `eta` times as many rounds.
    `budget` bounds the rounds of all trials together, `minutes` the time, `trials` the number of combinations. A
    repeated call with the same `out` continues an unfinished search. `on_status` is called with the progress of all
    trials. `progress` is that of `run`. `more` takes settings, and `workers`, `device` and `data_dir` as in `run`.
    """
    names, objects = _named(_partitioned(data, more), model)
    objects = replace(objects, functions=_own_functions(more))
    how = _engine(more, "workers", "device", "data_dir")
    limits = Budget(eta, budget, minutes, trials)
    chosen: list[str | type[Method]] = [methods] if isinstance(methods, str | type) else list(methods)
    if space is not None and not space and len(chosen) == 1:
        raise CoterieError("space names no setting to search; give a list of values for each, such as lr = [0.01, 0.1]")
    folder = _path(out) or fresh_folder("tune")
    made = make_trials(chosen, space, folder, objects, rounds, limits, seed=seed, **names, **more)
    given = callbacks or _TO_LOG
    with with_bar(given, progress_wanted(progress, callbacks)) as (shown, bar):
        shown.on_start("tune", len(made) * rounds)

        def on_each_status(status: SweepStatus) -> None:
            bar.update(status.done(), f"{len(status.rounds)} trials")
            on_status(status)

        tuning = search(made, folder, how, limits, sampler, seed, on_each_status, given.should_stop)
    if callbacks is None:  # otherwise the caller shows them with the results
        for number, reason in tuning.failed.items():
            log.warning("%s failed: %s", tuning.trials[number].name, reason)
    return tuning


def comparison_cells(
    methods: Sequence[str | type[Method]],
    data: str | Path | Dataset | DataFunction,
    model: str | nn.Module | Factory | PerClient | None,
    seeds: int | Sequence[int],
    folder: Path,
    against: str | Sequence[str] = (),
    **more: Any,
) -> list[Cell]:
    """Return the runs of a comparison.

    Settings of the run and the federation apply to all methods, other settings to the methods that have them.
    `method.setting` applies to one method, and to the controls that this method declares and that are added here.
    """
    named, objects = _named(_partitioned(data, more), model)
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise CoterieError(f"methods = {methods!r} is invalid: compare takes a list of methods")
    more = _with_one_rule_of_use(more)
    objects = replace(objects, functions=_own_functions(more))
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
    classes = {name: method_class(resolve(m, readings[name])[0]) for name, m in chosen.items()}
    has = {name: fields(m, readings[name]) for name, m in chosen.items()}
    if model is None and any("bn" in m.needs for m in classes.values()):
        named["model"] = WITH_NORM  # all methods train the same model
    flat = {**more, **table("federation", more.get("federation"))}
    if "public" not in flat and any("public" in m.needs for m in classes.values()):
        more = {"public": PUBLIC, **more}  # all methods have the same clients
    shared = {k: v for k, v in more.items() if "." not in k}
    single = {k: v for k, v in more.items() if "." in k}
    for k in single:
        whose, _, setting = k.partition(".")
        if whose not in classes:
            raise unknown("method in the setting", whose, classes)
        if owner(setting, has[whose]) == "federation" and setting not in APART:
            raise CoterieError(f"{k} is invalid: {setting} is a setting of the federation, and all methods share it")
    of_methods = {k for k in shared if k not in ("settings", "federation") and owner(k, *has.values()) == "method"}
    cells = []
    for name, method in chosen.items():
        given = {k: v for k, v in shared.items() if k not in of_methods or k in has[name]}
        for whose in (added.get(name, ""), name):  # a control takes over the settings of its method where it can
            own = {k.removeprefix(f"{whose}."): v for k, v in single.items() if whose and k.startswith(f"{whose}.")}
            given |= {k: v for k, v in own.items() if whose == name or _takes_over(classes[name], has[name], k)}
        its_objects = replace(objects, method=None if isinstance(method, str) else method)
        for seed in _seeds(seeds):
            chosen_settings = settings(**{**given, "method": method, "seed": seed, **named})
            cells.append(Cell(chosen_settings, folder / f"{name}-s{seed}", its_objects))
    return cells


def _with_one_rule_of_use(more: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a comparison with one rule of use for all methods; "own" leaves each method its own."""
    if more.get("use") == "own":
        return {k: v for k, v in more.items() if k != "use"}
    return {"use": "received", **more}


def _engine(given: dict[str, Any], *names: str) -> Engine:
    """Take the options about how a run is computed, or those of these names, out of `given` and check them."""
    how = {name: given.pop(name) for name in names or Engine.model_fields if name in given}
    return engine_of(**{**how, "data_dir": _path(how.get("data_dir"))})


def _rivals(against: str | Sequence[str]) -> list[str]:
    return [against] if isinstance(against, str) and against else list(against)


def _controls(chosen: Mapping[str, str | type[Method]], against: str | Sequence[str]) -> dict[str, str]:
    """Return the methods to add, each with the method it is a control of; empty for a control of all methods."""
    names = _rivals(against)
    wanted = {n.partition("/")[0]: "" for n in names if n != CONTROLS}
    if CONTROLS in names:
        wanted |= {n: "" for n in GENERAL if n in method_names()}
        wanted |= {c: name for name, m in chosen.items() for c in controls(m)}
    present = {method_class(m) for m in chosen.values()}
    added: dict[str, str] = {}
    for name, whose in wanted.items():
        if (cls := method_class(name)) not in present:
            present.add(cls)
            added[registered_name(name)] = whose
    return added


def _takes_over(cls: type[Method], has: Collection[str], setting: str) -> bool:
    """True if a control takes over this setting of its method; not if the setting defines the control."""
    if setting in has:
        return setting not in getattr(cls.Settings, "fixed", {})
    return setting in RunSettings.model_fields or setting in APART


def shared_choices(cells: Sequence[Cell]) -> list[str]:
    """Return one message for each choice that one method needs and that applies to all methods of a comparison."""
    needs: dict[str, list[str]] = {"bn": [], "public": []}
    for cell in {c.settings.method: c for c in cells}.values():
        cls = cell.objects.method or method_class(cell.settings.method)
        for need in needs.keys() & set(cls.needs):
            needs[need].append(cls.card.title or cls.__name__)
    sentences, s = [], cells[0].settings
    if needs["bn"] and s.model == WITH_NORM:
        names = _first_names(needs["bn"])
        sentences.append(f"all methods train the default model with batch norm (needed by {names})")
    if needs["public"] and s.federation.public == PUBLIC:
        names = _first_names(needs["public"])
        sentences.append(f"{PUBLIC} items are set aside as a public set without labels (needed by {names})")
    return sentences


def _first_names(titles: Sequence[str]) -> str:
    return ", ".join(titles[:3]) + (f" and {len(titles) - 3} more" if len(titles) > 3 else "")


def _seeds(seeds: Any) -> list[int]:
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds) if isinstance(seeds, Iterable) else []
    if not numbers or not all(isinstance(s, int) for s in numbers) or len(set(numbers)) < len(numbers):
        raise CoterieError(f"seeds = {seeds!r} is invalid: it must be a number above 0 or a list of different seeds")
    return numbers


def _objects(
    method: type[Method] | None, data: Dataset | DataFunction | None, model: nn.Module | Factory | None
) -> Objects:
    dataset, source = _loaded(data) if data is not None else (None, "")
    if not (dataset is None or isinstance(dataset, Dataset)):
        kind = type(data).__name__
        raise CoterieError(f"data of type {kind} is invalid: it must be a Dataset or a function that returns one")
    return Objects(method, dataset, model, source)


def _loaded(data: Any) -> tuple[Any, str]:
    """Call a data function of the user; return its data set and module:name. Other data are returned as they are."""
    if isinstance(data, str | Path | Dataset) or not callable(data):
        return data, ""
    return call_data_function(data, f"the data function {origin(data)}"), origin(data)


def _named(
    data: str | Path | Dataset | DataFunction, model: str | nn.Module | Factory | PerClient | None
) -> tuple[dict[str, Any], Objects]:
    """Return names for the settings, and the objects behind names that cannot be looked up."""
    loaded, source = _loaded(data)
    data = cast(str | Path | Dataset, loaded)
    own_data, own_model = isinstance(data, Dataset), not (model is None or isinstance(model, str))
    if not own_data and not isinstance(data, str | Path):
        kind = type(data).__name__
        raise CoterieError(
            f"data of type {kind} is invalid: it must be a name, a path, a function or a Dataset; data frames become "
            "one with coterie.from_frame(frame, target=..., client=...), arrays with coterie.from_arrays(x, y)"
        )
    if own_model and not callable(model) and not isinstance(model, PerClient):
        raise CoterieError(
            f"model = {model!r} is invalid: it must be a name, an nn.Module or a function that returns one"
        )
    names = {
        "data": data.name if isinstance(data, Dataset) else os.fspath(data),
        "model": getattr(model, "__name__", type(model).__name__) if own_model else model,
    }
    own = data if isinstance(data, Dataset) else None
    return names, Objects(None, own, None if isinstance(model, str) else model, source)


def _own_functions(more: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the user's functions among the settings, and replace them by their names there."""
    found: dict[str, Callable[..., Any]] = {}
    rule, metrics, loss = more.get("optimizer"), more.get("metrics"), more.get("loss")
    if rule is not None and not isinstance(rule, str):
        more["optimizer"] = text = named_optimiser(rule) or _origin_of("optimizer", rule)
        found |= {"optimizer": rule} if ":" in text else {}
    if loss is not None and not isinstance(loss, str):
        more["loss"] = _origin_of("loss", loss)
        found["loss"] = loss
    if callable(metrics) or isinstance(metrics, list | tuple):
        given = [metrics] if callable(metrics) else metrics
        names = [m if isinstance(m, str) else _origin_of("metrics", m) for m in given]
        found |= {metric_key(n): m for n, m in zip(names, given, strict=True) if not isinstance(m, str)}
        more["metrics"] = ",".join(names)
    return found


def _origin_of(setting: str, function: Any) -> str:
    if not callable(function) or not hasattr(function, "__qualname__"):
        given = repr(function) if isinstance(function, int | float) else f"a {type(function).__name__}"
        raise CoterieError(f"{setting} = {given} is invalid: it must be a name, a class or a function")
    return origin(function)


def _partitioned(data: Any, more: dict[str, Any]) -> Any:
    """Return the data divided by a partition of the user (arrays of sample numbers, or a function), if one is given."""
    if isinstance(more.get("partition", ""), str):
        return data
    dataset, _ = _loaded(data)
    if isinstance(dataset, str | Path):
        columns = TableColumns(
            **{
                name.removesuffix("_column"): more.pop(name, None)
                for name in ("target", "client", "features", "split_column")
            }
        )
        folder, subset = more.get("data_dir"), more.pop("subset", None)
        dataset = load_dataset(os.fspath(dataset), folder, subset, more.get("task"), columns)
    return with_partition(dataset, more.pop("partition"))


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
