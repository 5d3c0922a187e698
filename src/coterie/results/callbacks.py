"""Callbacks after every round: functions of the user, TensorBoard, MLflow, Weights & Biases."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from coterie.engine.loop import Progress
from coterie.engine.session import Session
from coterie.errors import CoterieError, unknown
from coterie.storage.atomic import write_atomic

Callback = Callable[[Progress], object]
OnRound = Callback | Sequence[Callback]
TRACKERS = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}  # and what they import


class RoundCallbacks:
    """Runs the callbacks after a round and remembers whether one of them returned True, which asks the run to stop."""

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


def checked_callbacks(on_round: OnRound) -> list[Callback]:
    """Return the given function or functions as a list; raise CoterieError if one cannot be called."""
    calls = [on_round] if callable(on_round) or not isinstance(on_round, Sequence) else list(on_round)
    for call in calls:
        if not callable(call):
            raise CoterieError(f"on_round = {call!r} is invalid: it must be a function or a list of functions")
    return calls


def tracker_package(track: str) -> Any:
    """Import the package of a tracker; raise CoterieError if the name is unknown or the package is not installed."""
    if track not in TRACKERS:
        raise unknown("tracker", track, TRACKERS)
    try:
        return import_module(TRACKERS[track])
    except ImportError:
        wanted = "wandb" if track == "wandb" else "'coterie[track]'"
        raise CoterieError(f"track = {track} needs a package that is not installed: pip install {wanted}") from None


@contextmanager
def round_callbacks(on_round: OnRound, track: str | None, session: Session, folder: Path) -> Iterator[RoundCallbacks]:
    """Open the callbacks of a run, which are checked before it starts."""
    calls = checked_callbacks(on_round)
    with ExitStack() as stack:
        if track is not None:
            opened = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
            package = tracker_package(track)
            calls.append(stack.enter_context(opened[track](package, session, folder)))
        yield RoundCallbacks(calls)


def numbers(progress: Progress) -> dict[str, float]:
    """Return the finite numbers that a round measured, by name."""
    event = progress.event
    values: dict[str, Any] = {"loss": event.get("loss"), "seconds": progress.seconds}
    for view, stats in event.get("eval", {}).items():
        values |= {f"{view}/{k}": v for k, v in stats.items()}
    for when, stats in event.get("watch", {}).items():
        values |= {f"participants/{when}/{k}": stats.get(k) for k in ("mean", "pooled")}
    values |= {f"note/{k}": v for k, v in event.get("notes", {}).items()}
    for link, ways in progress.bytes.items():
        values |= {f"bytes/{link}/{way}": sum(parts.values()) for way, parts in ways.items()}
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}


def flat(session: Session) -> dict[str, str]:
    """Return the settings of a run as text, by name."""
    outer = session.settings.model_dump(mode="json")
    inner = {**outer.pop("federation"), **{f"method.{k}": v for k, v in session.method.hp.model_dump().items()}}
    outer.pop("settings")
    return {k: str(v) for k, v in {**outer, **inner}.items() if v is not None}


@contextmanager
def tensorboard(package: Any, session: Session, folder: Path) -> Iterator[Callback]:
    """Write curves to the folder tensorboard in the run's folder; a resumed run continues them."""
    opened: list[Any] = []

    def on_round(p: Progress) -> None:
        if not opened:  # rounds that are computed again replace their old points
            opened.append(package.SummaryWriter(str(folder / "tensorboard"), purge_step=p.round))
        for name, value in numbers(p).items():
            opened[0].add_scalar(name, value, p.round)
        opened[0].flush()

    try:
        yield on_round
    finally:
        for writer in opened:
            writer.close()


@contextmanager
def mlflow(tracker: Any, session: Session, folder: Path) -> Iterator[Callback]:
    """Log to a run of MLflow at MLFLOW_TRACKING_URI; a resumed run continues the same one."""
    file = folder / "mlflow.json"
    before = _tracked_run(file)
    opened: list[Any] = []

    def on_round(p: Progress) -> None:
        if not opened:
            opened.append(tracker.start_run(run_id=before, run_name=None if before else folder.name))
            if before is None:
                write_atomic(file, json.dumps({"run": opened[0].info.run_id}).encode())
                tracker.log_params(_cut(flat(session)))
        tracker.log_metrics({_plain(k): v for k, v in numbers(p).items()}, step=p.round)

    status = "FAILED"
    try:
        yield on_round
        status = "FINISHED"
    finally:
        if opened:
            tracker.end_run(status)


@contextmanager
def wandb(tracker: Any, session: Session, folder: Path) -> Iterator[Callback]:
    """Log to a run of Weights & Biases, in the project of WANDB_PROJECT; a resumed run continues the same one."""
    file = folder / "wandb.json"
    before = _tracked_run(file)
    opened: list[Any] = []

    def on_round(p: Progress) -> None:
        if not opened:
            known = {"id": before, "resume": "must"} if before else {"name": folder.name, "config": flat(session)}
            opened.append(tracker.init(dir=str(folder), **known))
            if before is None:
                write_atomic(file, json.dumps({"run": opened[0].id}).encode())
        # rounds that are computed again after an interruption are older than the last step, and W&B ignores them
        opened[0].log(numbers(p), step=p.round)

    status = 1
    try:
        yield on_round
        status = 0
    finally:
        for run in opened:
            run.finish(exit_code=status)


def _tracked_run(file: Path) -> str | None:
    """Return the run of a tracker that an interrupted run logged to."""
    return str(json.loads(file.read_text())["run"]) if file.exists() else None


def _cut(params: Mapping[str, str]) -> dict[str, str]:
    return {k: v[:500] for k, v in params.items()}  # MLflow's limit


def _plain(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
