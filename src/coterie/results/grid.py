"""Run many cells in several processes that share loaded data; finished cells are skipped."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coterie.config import Engine, RunSettings
from coterie.data.dataset import Dataset
from coterie.data.federation import Federation, federate, like_recorded
from coterie.data.sources import load_dataset
from coterie.data.target_types import with_task
from coterie.engine.loop import Progress
from coterie.engine.personal_models import initial_values
from coterie.engine.session import (
    Callbacks,
    Objects,
    Session,
    bind,
    check_unchanged,
    execute,
    follow_data,
    prepare,
    recorded,
    resolved,
)  # fmt: skip
from coterie.errors import CoterieError
from coterie.methods import build_method
from coterie.results.callbacks import round_callbacks
from coterie.results.run import Run
from coterie.storage.run_folder import checkpoints, round_of
from coterie.train.devices import CPU, device_names, find_devices, forks_can_train


@dataclass(frozen=True)
class Cell:
    """One run of a sweep and its folder; `objects` replace names in the settings."""

    settings: RunSettings
    out: Path
    objects: Objects = field(default_factory=Objects)
    until: int | None = None  # pause after this round; the continued run is the same to the bit

    @property
    def rounds(self) -> int:
        return self.settings.rounds if self.until is None else min(self.until, self.settings.rounds)

    def finished(self) -> bool:
        """True if the folder holds this run, finished and undamaged, with its last checkpoint.

        Raise CoterieError if its settings differ.
        """
        if not (self.out / "settings.json").exists():
            return False
        run = Run(self.out)
        try:
            # settings newer than the run have their defaults
            made_with = recorded(run.description, self.objects.method)
            mine = resolved(self.settings, self.objects.method)
            federation = like_recorded(mine.federation, made_with.federation)
            same = made_with == mine.model_copy(update={"federation": federation})
        except (CoterieError, ValidationError, TypeError) as e:
            made = run.description.get("versions", {}).get("coterie", "unknown")
            raise CoterieError(
                f"{self.out} was written by a different version of Coterie ({made}); choose a new folder or remove it"
            ) from e
        if not same:
            raise CoterieError(f"{self.out} holds a run with different settings; choose a new folder or remove it")
        try:
            saved = checkpoints(self.out)
            whole = bool(saved) and round_of(saved[-1]) == run.last_round
            return (run.finished or run.last_round >= self.rounds) and whole and not run.damage
        except CoterieError:
            return False  # damaged: resuming the run reports and recomputes it


@dataclass
class SweepStatus:
    """Progress of a sweep: rounds done per cell, and errors."""

    rounds: dict[Path, int]
    planned: dict[Path, int]
    text: dict[Path, str] = field(default_factory=dict)  # the last score as text
    failed: dict[Path, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    skipped: int = 0  # rounds that were computed before

    def done(self) -> int:
        return sum(self.rounds.values())

    def total(self) -> int:
        return sum(self.planned.values())

    def running(self) -> str:
        """Return the names of the unfinished runs, with their scores."""
        at = [path for path, done in self.rounds.items() if 0 < done < self.planned[path]]
        return ", ".join(" ".join(w for w in (path.name, self.text.get(path, "")) if w) for path in at)

    def seconds_left(self) -> float | None:
        fresh = self.done() - self.skipped
        return (time.monotonic() - self.began) / fresh * (self.total() - self.done()) if fresh > 0 else None


def sweep(
    cells: Sequence[Cell],
    engine: Engine,
    tell: Callable[[SweepStatus], object] = lambda s: None,
    stopped: Callable[[], bool] = lambda: False,
    check: bool = False,
    on_round: Callable[[Progress], object] | None = None,
    track: str | None = None,
) -> SweepStatus:
    """Run every cell to its end, each in its own process (a single cell uses all workers).

    With `check`, raise CoterieError before training if a method cannot run on its data and model. `on_round` is called
    in this process after every round of every cell, which waits for it; if `stopped` is True then, the cell stops after
    that round. `track` is the tracker of every cell.
    """
    status = SweepStatus({c.out: 0 for c in cells}, {c.out: c.rounds for c in cells})
    waiting = []
    data = _Loaded(engine)
    for cell in cells:
        if cell.finished():
            status.said += data.check_unchanged(cell)
            status.rounds[cell.out] = cell.rounds
            status.skipped += cell.rounds
        else:
            waiting.append(cell)
    tell(status)
    devices = find_devices(engine.device)
    own = len(devices) if devices != (CPU,) else os.cpu_count() or 1
    workers = engine.workers or own
    if check:
        _check(waiting, data)
    if waiting and not forks_can_train():
        raise CoterieError(
            "several runs need processes of their own, and on a machine with a GPU PyTorch refuses gradients in them "
            "once this process has computed some; start again in a fresh process"
        )
    parallel = min(workers, len(waiting))
    inner = engine.model_copy(update={"workers": max(1, workers // max(1, parallel))})
    live: dict[Any, tuple[Cell, Any]] = {}
    started = 0
    fork = multiprocessing.get_context("fork")
    try:
        while (waiting and not stopped()) or live:
            while waiting and len(live) < parallel and not stopped():
                cell = waiting.pop(0)
                try:
                    dataset = cell.objects.dataset or data.get(cell.settings)
                except CoterieError as e:
                    status.failed[cell.out] = str(e)
                    tell(status)
                    continue
                ours, theirs = fork.Pipe()
                how = inner
                if parallel > 1:  # each cell on one device; a single cell uses all of them
                    how = inner.model_copy(update={"device": device_names([devices[started % len(devices)]])})
                started += 1
                given = (cell, how, dataset, theirs, on_round is not None, track)
                process = fork.Process(target=_run_cell, args=given)
                process.start()
                theirs.close()
                live[ours] = (cell, process)
            for ready in multiprocessing.connection.wait(list(live), timeout=0.5):
                pipe: Any = ready
                progress = _receive(pipe, live, status)
                if progress is not None and on_round is not None:
                    on_round(progress)
                    with suppress(OSError):  # the cell was killed
                        pipe.send(stopped())
            tell(status)
    finally:
        for _, process in live.values():
            process.terminate()
    return status


def _check(cells: Sequence[Cell], data: "_Loaded") -> None:
    """Prepare one run of every method, on the clients of one seed; raise CoterieError if that fails."""
    for cell in {c.settings.method: c for c in reversed(cells)}.values():
        data.session(cell)


def _receive(pipe: Any, live: dict[Any, tuple[Cell, Any]], status: SweepStatus) -> Progress | None:
    """Take one message of a cell into the status; return the progress if the message is about a round."""
    cell, process = live[pipe]
    try:
        kind, value = pipe.recv()
    except (EOFError, OSError):
        process.join()
        if process.exitcode and cell.out not in status.failed:
            status.failed[cell.out] = f"its process ended with code {process.exitcode}"
        elif cell.out not in status.failed and Run(cell.out).ended:
            status.planned[cell.out] = status.rounds[cell.out]
        pipe.close()
        del live[pipe]
        return None
    if kind == "round":
        status.rounds[cell.out], status.text[cell.out] = value.round, value.text
        progress: Progress = replace(value, run=cell.out.name)
        return progress
    if kind == "failed":
        status.failed[cell.out] = value
    else:
        status.said.append(f"{cell.out.name}: {value}")
    return None


def _run_cell(cell: Cell, engine: Engine, dataset: Dataset, pipe: Any, waits: bool, track: str | None) -> None:
    """Run a cell in its own process, which receives Ctrl-C too: it finishes its round, writes a checkpoint and ends."""
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.append(1))

    def tell(p: Progress) -> None:
        send("round", p)
        if (waits and told_to_stop()) or p.round >= cell.rounds:
            stop.append(1)

    def told_to_stop() -> bool:
        try:
            while not pipe.poll(0.5):
                if stop:
                    return True
            return bool(pipe.recv())
        except (EOFError, OSError):
            return True  # the parent is gone

    def send(kind: str, value: Any) -> None:
        try:
            pipe.send((kind, value))
        except (BrokenPipeError, OSError):
            stop.append(1)  # the parent is gone

    try:
        resume = (cell.out / "settings.json").exists()
        settings = recorded(Run(cell.out).description, cell.objects.method) if resume else cell.settings
        session = prepare(settings, engine, cell.objects, loaded=dataset, start=initial_values(settings))
        with round_callbacks(tell, track, session, cell.out) as after_round:
            callbacks = Callbacks(
                on_round=after_round, on_warning=lambda text: send("said", text), should_stop=lambda: bool(stop)
            )
            execute(session, cell.out, callbacks, resume=resume)
    except CoterieError as e:
        send("failed", str(e))
    except Exception:
        send("failed", traceback.format_exc())
    pipe.close()


class _Loaded:
    """Data sets that are loaded once and inherited by the cells' processes, and their federations."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.loaded: dict[tuple[object, ...], Dataset] = {}
        self.federations: dict[str, Federation] = {}

    def get(self, settings: RunSettings) -> Dataset:
        key = (settings.data, settings.columns, settings.subset, settings.task)
        if key not in self.loaded:
            self.loaded[key] = load_dataset(
                settings.data, self.engine.data_dir, settings.subset, settings.task, settings.columns
            )
            _ = self.loaded[key].digest  # computed once, here
        return self.loaded[key]

    def session(self, cell: Cell) -> Session:
        """Return the session of a cell as it would begin now; raise CoterieError if it cannot run."""
        s = cell.settings
        dataset = with_task(cell.objects.dataset or self.get(s), s.task)
        s = follow_data(s, dataset, cell.objects)
        name = f"{s.data} {s.columns} {s.subset} {s.task} {s.seed} {s.federation.model_dump_json()}"
        if name not in self.federations:
            self.federations[name] = federate(dataset, s.federation, s.seed)
        method, start = build_method(cell.objects.method or s.method, s.settings), initial_values(s)
        session = bind(s, self.engine, method, self.federations[name], cell.objects.model, start)
        return replace(session, objects=cell.objects)

    def check_unchanged(self, cell: Cell) -> list[str]:
        """Raise CoterieError if data, model or code of a finished cell have changed; return what cannot be told."""
        try:
            check_unchanged(self.session(cell), cell.out)
        except CoterieError as e:
            raise CoterieError(f"{e}; choose a new folder or remove it") from e
        about = Run(cell.out).description
        if "method" in about.get("digests", {}):
            return []
        made = about.get("versions", {}).get("coterie", "unknown")
        return [f"{cell.out.name}: taken as it is; Coterie {made} did not record the code of its method"]
