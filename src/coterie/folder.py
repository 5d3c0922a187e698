"""A run's folder as it is written: settings, append-only events, evaluations, checkpoints.

settings.json     what was asked for, fully resolved, with the identity of the partition
events.jsonl      one line per round; a function of settings and seed alone, byte for byte
timing.jsonl      wall-clock per round; not reproducible, so kept apart
eval/NNNNNN.npz   hits, totals and losses of every client, view and part
checkpoints/      the last two, whole or not there at all
clients/          private state of the clients, one file each
"""

import fcntl
import io
import json
import math
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from coterie import codec
from coterie.errors import CoterieError

KEPT = 2  # checkpoints


class Folder:
    """Opens and locks a run's folder; a second process is refused as long as this one lives."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        # a record lock is not inherited by forked workers, so it ends with this process, however it ends
        self._lock = (path / "lock").open("w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise CoterieError(f"{path} is in use by another process") from None
        self._events: IO[bytes] | None = None
        self._timing: IO[bytes] | None = None

    def close(self) -> None:
        for f in (self._events, self._timing):
            if f is not None:
                f.close()
        self._lock.close()

    # ---- settings ----------------------------------------------------------------------------------------------------
    def write_settings(self, settings: dict[str, Any]) -> None:
        codec.write_atomic(self.path / "settings.json", json.dumps(settings, indent=2).encode() + b"\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        codec.write_atomic(self.path / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")

    # ---- events ------------------------------------------------------------------------------------------------------
    def open_logs(self, events_at: int = 0, timing_at: int = 0) -> None:
        """Continue both logs from the given lengths: what a crash left behind them is cut off."""
        self._events = _log(self.path / "events.jsonl", events_at)
        self._timing = _log(self.path / "timing.jsonl", timing_at)

    def event(self, **fields: Any) -> None:
        assert self._events is not None
        _append(self._events, fields)

    def timing(self, **fields: Any) -> None:
        assert self._timing is not None
        _append(self._timing, fields)

    def offsets(self) -> tuple[int, int]:
        assert self._events is not None and self._timing is not None
        return self._events.tell(), self._timing.tell()

    def evaluation(self, round: int, arrays: dict[str, np.ndarray]) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        codec.write_atomic(self.path / "eval" / f"{round:06d}.npz", buffer.getvalue(), durable=False)

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted((self.path / "checkpoints").glob("[0-9]*.safetensors"))

    def write_checkpoint(self, round: int, value: codec.Value) -> list[int]:
        """Write it atomically, drop all but the last two, return the rounds that are kept."""
        for f in (self._events, self._timing):
            if f is not None:
                os.fsync(f.fileno())
        codec.save(self.path / "checkpoints" / f"{round:06d}.safetensors", value)
        for old in self.checkpoints()[:-KEPT]:
            old.unlink()
        return [int(p.name.split(".")[0]) for p in self.checkpoints()]


def _log(path: Path, length: int) -> IO[bytes]:
    f = path.open("ab")
    if f.tell() < length:
        f.close()
        raise CoterieError(f"{path} is shorter than the checkpoint says; an older checkpoint is needed")
    f.truncate(length)
    f.seek(length)
    return f


def _append(f: IO[bytes], fields: dict[str, Any]) -> None:
    f.write(json.dumps(_finite(fields), allow_nan=False).encode() + b"\n")
    f.flush()


def _finite(value: Any) -> Any:
    """Plain JSON: arrays as lists, and null for what is no number (other languages cannot read NaN)."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
