"""Run many cells in several processes that share loaded data; finished cells are skipped."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coterie.config import Engine, RunSettings
from coterie.data.dataset import Dataset
from coterie.data.federation import Federation, federate
from coterie.data.sources import load_dataset
from coterie.engine.loop import Progress
from coterie.engine.personal_models import initial_values
from coterie.engine.session import Callbacks, Objects, bind, execute, prepare, recorded, resolved
from coterie.errors import CoterieError
from coterie.methods import build
from coterie.results.run import Run


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
        """True if the folder holds this run, finished and undamaged; raise CoterieError if its settings differ."""
        if not (self.out / "settings.json").exists():
            return False
        run = Run(self.out)
        try:
            # settings newer than the run have their defaults
            same = recorded(run.description, self.objects.method) == resolved(self.settings, self.objects.method)
        except (CoterieError, ValidationError, TypeError) as e:
            made = run.description.get("versions", {}).get("coterie", "unknown")
            raise CoterieError(
                f"{self.out} was written by a different version of Coterie ({made}); choose a new folder or remove it"
            ) from e
        if not same:
            raise CoterieError(f"{self.out} holds a run with different settings; choose a new folder or remove it")
        try:
            return (run.finished or run.last_round >= self.rounds) and not run.damage
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

    def seconds_left(self) -> float | None:
        fresh = self.done() - self.skipped
        return (time.monotonic() - self.began) / fresh * (self.total() - self.done()) if fresh > 0 else None


def sweep(
    cells: Sequence[Cell],
    engine: Engine,
    tell: Callable[[SweepStatus], object] = lambda s: None,
    stopped: Callable[[], bool] = lambda: False,
    check: bool = False,
) -> SweepStatus:
    """Run every cell to its end, each in its own process (a single cell uses all workers).

    With `check`, raise CoterieError before training if a method cannot run on its data and model.
    """
    status = SweepStatus({c.out: 0 for c in cells}, {c.out: c.rounds for c in cells})
    waiting = []
    for cell in cells:
        if cell.finished():
            status.rounds[cell.out] = cell.rounds
            status.skipped += cell.rounds
        else:
            waiting.append(cell)
    tell(status)
    workers = engine.workers or os.cpu_count() or 1
    data = _Loaded(engine)
    if check:
        _check(waiting, engine, data)
    parallel = min(workers, len(waiting))
    inner = engine.model_copy(update={"workers": max(1, workers // max(1, parallel))})
    live: dict[Any, tuple[Cell, Any]] = {}
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
                receiver, sender = fork.Pipe(duplex=False)
                process = fork.Process(target=_run_cell, args=(cell, inner, dataset, sender))
                process.start()
                sender.close()
                live[receiver] = (cell, process)
            for pipe in multiprocessing.connection.wait(list(live), timeout=0.5):
                _receive(pipe, live, status)
            tell(status)
    finally:
        for _, process in live.values():
            process.terminate()
    return status


def _check(cells: Sequence[Cell], engine: Engine, data: "_Loaded") -> None:
    """Prepare one run of every method, on the clients of one seed; raise CoterieError if that fails."""
    first = {c.settings.method: c for c in reversed(cells)}
    federations: dict[str, Federation] = {}
    for cell in first.values():
        s = cell.settings
        name = f"{s.data} {s.subset} {s.seed} {s.federation.model_dump_json()}"
        if name not in federations:
            federations[name] = federate(cell.objects.dataset or data.get(s), s.federation, s.seed)
        bind(s, engine, build(cell.objects.method or s.method, s.settings), federations[name], cell.objects.model)


def _receive(pipe: Any, live: dict[Any, tuple[Cell, Any]], status: SweepStatus) -> None:
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
        return
    if kind == "round":
        status.rounds[cell.out], status.text[cell.out] = value
    elif kind == "failed":
        status.failed[cell.out] = value
    else:
        status.said.append(f"{cell.out.name}: {value}")


def _run_cell(cell: Cell, engine: Engine, dataset: Dataset, pipe: Any) -> None:
    """Run a cell in its own process, which receives Ctrl-C too: it finishes its round, writes a checkpoint and ends."""
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.append(1))

    def tell(p: Progress) -> None:
        send("round", (p.round, p.text))
        if p.round >= cell.rounds:
            stop.append(1)

    def send(kind: str, value: Any) -> None:
        try:
            pipe.send((kind, value))
        except (BrokenPipeError, OSError):
            stop.append(1)  # the parent is gone

    try:
        resume = (cell.out / "settings.json").exists()
        settings = recorded(Run(cell.out).description, cell.objects.method) if resume else cell.settings
        session = prepare(settings, engine, cell.objects, loaded=dataset, start=initial_values(settings))
        if resume and Run(cell.out).description["partition"] != session.federation.identity:
            raise CoterieError(f"the data of {cell.out} have changed since it ran; choose a new folder or remove it")
        callbacks = Callbacks(on_round=tell, on_warning=lambda text: send("said", text), should_stop=lambda: bool(stop))
        execute(session, cell.out, callbacks, resume=resume)
    except CoterieError as e:
        send("failed", str(e))
    except Exception:
        send("failed", traceback.format_exc())
    pipe.close()


class _Loaded:
    """Data sets that are loaded once and inherited by the cells' processes."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.loaded: dict[tuple[str, int | str | None], Dataset] = {}

    def get(self, settings: RunSettings) -> Dataset:
        key = (settings.data, settings.subset)
        if key not in self.loaded:
            self.loaded[key] = load_dataset(settings.data, self.engine.data_dir, settings.subset)
            _ = self.loaded[key].digest  # computed once, here
        return self.loaded[key]
