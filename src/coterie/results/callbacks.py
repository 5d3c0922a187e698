"""What is called after every round: a user's own functions, TensorBoard, MLflow."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from coterie.engine.loop import Progress
from coterie.engine.session import Session
from coterie.errors import CoterieError, unknown
from coterie.storage.atomic import write_atomic

Callback = Callable[[Progress], object]
OnRound = Callback | Sequence[Callback]
TRACKERS = ("tensorboard", "mlflow")


class RoundCallbacks:
    """Calls everybody after a round; remembers if somebody asked to stop by returning True."""

    def __init__(self, callbacks: Sequence[Callback]):
        self.callbacks, self.asked = list(callbacks), False

    def __call__(self, progress: Progress) -> None:
        for call in self.callbacks:
            try:
                self.asked = call(progress) is True or self.asked
            except CoterieError:
                raise
            except Exception as e:  # a user's code may raise anything
                name = getattr(call, "__name__", type(call).__name__)
                raise CoterieError(
                    f"on_round {name} failed after round {progress.round}: {type(e).__name__}: {e}; the run can be "
                    "resumed"
                ) from e

    def stopped(self) -> bool:
        return self.asked


@contextmanager
def round_callbacks(on_round: OnRound, track: str | None, session: Session, folder: Path) -> Iterator[RoundCallbacks]:
    """The callbacks of a run, checked before it starts."""
    calls = [on_round] if callable(on_round) else list(on_round)
    for call in calls:
        if not callable(call):
            raise CoterieError(f"on_round = {call!r} is invalid: it must be a function or a list of functions")
    with ExitStack() as stack:
        if track is not None:
            if track not in TRACKERS:
                raise unknown("tracker", track, TRACKERS)
            opened = tensorboard if track == "tensorboard" else mlflow
            calls.append(stack.enter_context(opened(session, folder)))
        yield RoundCallbacks(calls)


def numbers(progress: Progress) -> dict[str, float]:
    """What a round measured, by name; only finite numbers."""
    event = progress.event
    found: dict[str, Any] = {"loss": event.get("loss"), "seconds": progress.seconds}
    for view, stats in event.get("eval", {}).items():
        found |= {f"{view}/{k}": v for k, v in stats.items()}
    for when, stats in event.get("watch", {}).items():
        found |= {f"participants/{when}/{k}": stats.get(k) for k in ("mean", "pooled")}
    found |= {f"note/{k}": v for k, v in event.get("notes", {}).items()}
    for link, ways in progress.bytes.items():
        found |= {f"bytes/{link}/{way}": sum(parts.values()) for way, parts in ways.items()}
    return {k: float(v) for k, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}


def flat(session: Session) -> dict[str, str]:
    """The settings of a run as text, by name."""
    found = session.settings.model_dump(mode="json")
    inner = {**found.pop("federation"), **{f"method.{k}": v for k, v in session.method.hp.model_dump().items()}}
    found.pop("settings")
    return {k: str(v) for k, v in {**found, **inner}.items() if v is not None}


@contextmanager
def tensorboard(session: Session, folder: Path) -> Iterator[Callback]:
    """Curves in the run's folder, under tensorboard; a resumed run goes on in them."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise CoterieError(_install("tensorboard")) from None
    opened: list[Any] = []

    def told(p: Progress) -> None:
        if not opened:  # rounds that are computed again replace what was drawn of them
            opened.append(SummaryWriter(str(folder / "tensorboard"), purge_step=p.round))
        for name, value in numbers(p).items():
            opened[0].add_scalar(name, value, p.round)
        opened[0].flush()

    try:
        yield told
    finally:
        for writer in opened:
            writer.close()


@contextmanager
def mlflow(session: Session, folder: Path) -> Iterator[Callback]:
    """A run of MLflow, wherever MLFLOW_TRACKING_URI says; a resumed run goes on in the same one."""
    try:
        import mlflow as tracker
    except ImportError:
        raise CoterieError(_install("mlflow")) from None
    kept = folder / "mlflow.json"
    before = str(json.loads(kept.read_text())["run"]) if kept.exists() else None
    opened: list[Any] = []

    def told(p: Progress) -> None:
        if not opened:
            opened.append(tracker.start_run(run_id=before, run_name=None if before else folder.name))
            if before is None:
                write_atomic(kept, json.dumps({"run": opened[0].info.run_id}).encode())
                tracker.log_params(_cut(flat(session)))
        tracker.log_metrics({_plain(k): v for k, v in numbers(p).items()}, step=p.round)

    status = "FAILED"
    try:
        yield told
        status = "FINISHED"
    finally:
        if opened:
            tracker.end_run(status)


def _cut(params: Mapping[str, str]) -> dict[str, str]:
    return {k: v[:500] for k, v in params.items()}  # MLflow takes no longer values


def _plain(name: str) -> str:
    """MLflow allows letters, digits, dashes, dots, spaces and slashes."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


def _install(what: str) -> str:
    return f"track = {what} needs a package that is not installed: pip install 'coterie[track]'"
