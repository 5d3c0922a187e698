"""Checkpoints: written atomically, and read back bit-identically."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.core.context import EdgeId, State
from coterie.core.states import register, typed
from coterie.engine import codec
from coterie.engine.ledger import Page
from coterie.errors import CoterieError
from coterie.methods.stored import FORMER, SERVERS
from coterie.runtimes.base import Runtime
from coterie.storage.client_states import Index
from coterie.storage.run_folder import Folder, checkpoints, read_checkpoint, round_of


class WrongMethodError(CoterieError):
    """The checkpoint is sound but belongs to a different method."""


@register
@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to continue after this round."""

    round: int
    method: str
    server: State
    edges: dict[EdgeId, State]
    clients: Index
    bytes: Page  # declared bytes since the start of the run
    events: int  # length of events.jsonl
    timing: int
    combiner: dict[str, Any] = field(default_factory=dict)  # memories of the combiner's stages, by setting


def save_checkpoint(folder: Folder, runtime: Runtime, made: Callable[[Index], Checkpoint]) -> None:
    """Write client states first, then the file that names them, so that a crash keeps the previous checkpoint valid."""
    saved = made(runtime.save())
    kept = folder.write_checkpoint(saved.round, codec.pack(saved))
    runtime.forget(min(kept))


def restore_checkpoint(
    folder: Folder, runtime: Runtime, method: str, from_round: int | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Go back to the newest sound checkpoint, or to that of `from_round`; return one message for each damaged one.

    The run starts again from its first round if no checkpoint is sound.
    """
    complaints: list[str] = []
    paths = checkpoints(folder.path)
    if from_round is not None:
        return _roll_back(
            folder, runtime, load_checkpoint(_of_round(paths, from_round, folder.path), method), method
        ), []
    for i in range(len(paths) - 1, -1, -1):
        older = _indexes(paths[:i], method)
        try:
            saved = load_checkpoint(paths[i], method)
            runtime.restore(saved.clients, older)
            folder.open_logs(saved.events, saved.timing)
        except WrongMethodError:
            raise
        except CoterieError as e:
            complaints.append(f"{e}; falling back to the checkpoint before it")
            continue
        for bad in paths[i + 1 :]:
            bad.unlink()
        return saved, complaints
    runtime.restore(None)
    return None, [*complaints, "no sound checkpoint was found, so the run starts from its first round"]


def _indexes(paths: Sequence[Path], method: str) -> list[Index]:
    """Return the indexes of the sound checkpoints among these."""
    indices = []
    for path in paths:
        with suppress(CoterieError):
            indices.append(load_checkpoint(path, method).clients)
    return indices


def _of_round(paths: Sequence[Path], round: int, folder: Path) -> Path:
    for path in paths:
        if round_of(path) == round:
            return path
    there = ", ".join(str(round_of(p)) for p in paths)
    raise CoterieError(
        f"{folder} has no checkpoint of round {round}; "
        + (f"it has those of rounds {there}" if there else "it has no checkpoint")
    )


def _roll_back(folder: Folder, runtime: Runtime, saved: Checkpoint, method: str) -> Checkpoint:
    """Forget the rounds after this checkpoint, once all files that it needs have been found sound."""
    paths = [p for p in checkpoints(folder.path) if round_of(p) < saved.round]
    runtime.restore(saved.clients, _indexes(paths, method))
    folder.open_logs(saved.events, saved.timing)
    folder.roll_back(saved.round)
    return saved


def load_checkpoint(path: Path, method: str) -> Checkpoint:
    try:
        saved = codec.unpack(read_checkpoint(path))
    except CoterieError as e:
        raise CoterieError(f"{path} cannot be used: {e}") from e
    if not isinstance(saved, Checkpoint):
        raise CoterieError(f"{path} is not a checkpoint")
    if saved.method not in (method, FORMER.get(method)):
        raise WrongMethodError(f"{path} is a checkpoint of {saved.method}, not of {method}")
    return replace(saved, server=typed(SERVERS.get(method), saved.server))


def newest(path: Path, method: str) -> Checkpoint:
    """Return the newest sound checkpoint in a run's folder, without changing the folder."""
    complaint: CoterieError | None = None
    for file in reversed(checkpoints(path)):
        try:
            return load_checkpoint(file, method)
        except WrongMethodError:
            raise
        except CoterieError as e:
            complaint = complaint or e
    raise complaint or CoterieError(f"{path} has no checkpoint yet")
