"""A run's folder: settings, append-only events, evaluations, checkpoints. Every file is covered by a checksum.

settings.json     the resolved settings, with the identity of the partition
events.jsonl      one line per round; a function of settings and seed alone, byte for byte
timing.jsonl      wall-clock time per round, in a file of its own because it is not reproducible
eval/NNNNNN.npz   hits, totals and losses of every client, view and part; the event of the round has the digest
checkpoints/      the last few checkpoints, each complete or absent
clients/          private state of the clients, one file each; the checkpoint has the checksums
"""

import fcntl
import io
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import CoterieError
from coterie.storage import atomic as disk

KEPT = 2  # default number of kept checkpoints
EVENTS, TIMING, SETTINGS = "events.jsonl", "timing.jsonl", "settings.json"
EXTENDED = "extended.json"  # number of rounds of a run that was extended
START = "start.safetensors"  # initial values that came from another run
_TIMES = 1  # first checksum of the timing log, so that no line of the event log is valid in it
_open: set[Path] = set()  # folders written by this process; a record lock does not keep out its own threads
_guard = threading.Lock()


class Folder:
    """An open and locked run folder; no other process can write to it until it is closed."""

    def __init__(self, path: Path, keep: int = KEPT):
        self.path, self.keep = path, max(1, keep)
        self._events: io.FileIO | None = None
        self._timing: io.FileIO | None = None
        self._crc = 0  # checksum of the newest event
        self._evaluated: tuple[int, str] | None = None  # round and digest of the newest evaluation
        self._unsynced: list[Path] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._real = path.resolve()
            with _guard:
                if self._real in _open:
                    raise CoterieError(f"{path} is in use by another run of this process")
                # a record lock is not inherited by forked workers, so it ends with this process, however it ends
                self._lock = (path / "lock").open("w")
                try:
                    fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as e:
                    self._lock.close()
                    if isinstance(e, BlockingIOError | PermissionError):
                        raise CoterieError(f"{path} is in use by another process") from None
                    raise
                _open.add(self._real)
            for part in (path, path / "eval", path / "checkpoints"):
                for left in part.glob(disk.TEMPORARY):
                    left.unlink(missing_ok=True)
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or e
            raise CoterieError(f"{path} cannot be used as the folder of a run ({reason})") from None

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder. A folder without a run is restored as it was."""
        self._close_logs()
        with _guard:
            if self._real in _open:
                _open.discard(self._real)
                if not (self.path / SETTINGS).exists():
                    with suppress(OSError):
                        (self.path / "lock").unlink()
                        self.path.rmdir()  # refuses a folder that holds something
                self._lock.close()

    def _close_logs(self) -> None:
        for f in (self._events, self._timing):
            if f is not None:
                with suppress(OSError):  # nothing is buffered, so nothing can be lost here
                    f.close()

    # ---- settings ----------------------------------------------------------------------------------------------------
    def write_settings(self, settings: dict[str, Any]) -> None:
        disk.write_json(self.path / SETTINGS, settings)

    # ---- events ------------------------------------------------------------------------------------------------------
    def open_logs(self, events_at: int = 0, timing_at: int = 0, complain: Callable[[str], None] | None = None) -> None:
        """Continue both logs at the given lengths; lines that a crash left after them are cut off.

        Raise CoterieError if earlier events or evaluations are damaged, because they must be computed again. If that is
        impossible, `complain` gets the sentences, and damaged rows are removed.
        """
        log = read_log(self.path / EVENTS, events_at)
        damage = [*([log.damage] if log.damage else []), *evaluation_damage(self.path, log.rows)]
        if damage and complain is None:
            raise CoterieError(damage[0])
        self._crc = log.crc
        if damage and complain is not None:
            for sentence in damage:
                complain(sentence)
            events_at, self._crc = _mend(self.path, log.rows)
        self._close_logs()
        self._events = _appending(self.path / EVENTS, events_at)
        self._timing = _appending(self.path / TIMING, timing_at)

    def event(self, **fields: Any) -> None:
        """Append one line; the line of an evaluated round holds the digest of the evaluation file."""
        if self._evaluated is not None and self._evaluated[0] == fields.get("round"):
            fields["evaluation"] = self._evaluated[1]
        line, crc = disk.seal(fields, self._crc)
        _append(self._events, line)
        self._crc = crc

    def timing(self, **fields: Any) -> None:
        _append(self._timing, disk.seal(fields, _TIMES)[0])

    def offsets(self) -> tuple[int, int]:
        assert self._events is not None and self._timing is not None
        return self._events.tell(), self._timing.tell()

    def evaluation(self, round: int, arrays: dict[str, np.ndarray]) -> None:
        """Write the evaluation of a round, before the event of the same round."""
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        path = evaluation_file(self.path, round)
        disk.write_atomic(path, buffer.getvalue(), durable=False)
        self._unsynced.append(path)
        self._evaluated = round, disk.digest(buffer.getvalue()).hex()

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def roll_back(self, round: int) -> None:
        """Delete files of later rounds; the logs are cut when they are opened."""
        for later in (*checkpoints(self.path), *evaluations(self.path)):
            if round_of(later) > round:
                later.unlink()

    def write_checkpoint(self, round: int, blob: disk.Blob) -> list[int]:
        """Write a checkpoint atomically, delete all but the last `keep`, and return the rounds that are kept.

        All files written to this folder before survive a power cut together with it.
        """
        for f in (self._events, self._timing):
            if f is not None:
                os.fsync(f.fileno())
        disk.sync(self._unsynced)
        self._unsynced.clear()
        run = settings_fingerprint(self.path)
        sealed = [blob, run, disk.digest(blob, run, b"%d" % round)]
        disk.write_atomic(self.path / "checkpoints" / f"{round:06d}.state", sealed)
        for old in checkpoints(self.path)[: -self.keep]:
            old.unlink()
        return [round_of(p) for p in checkpoints(self.path)]


# ---- reading, which locks nothing ------------------------------------------------------------------------------------
def read_settings(path: Path) -> dict[str, Any]:
    """Return the content of settings.json in a run's folder."""
    written = _written(path)
    if not (path / EXTENDED).exists():
        return written
    rounds = disk.read_json(path / EXTENDED)["rounds"]
    return {**written, "plan": written["settings"]["rounds"], "settings": {**written["settings"], "rounds": rounds}}


def _written(path: Path) -> dict[str, Any]:
    """Return the settings that the run began with."""
    if not (path / SETTINGS).exists():
        raise CoterieError(f"{path} holds no run ({SETTINGS} is missing)")
    return disk.read_json(path / SETTINGS)


def extend(path: Path, rounds: int) -> None:
    """Record a larger number of rounds; settings.json stays as it is, because checkpoints carry its fingerprint."""
    disk.write_json(path / EXTENDED, {"rounds": rounds})


def settings_fingerprint(path: Path) -> bytes:
    """Return the fingerprint of a run's settings, which its checkpoints carry too."""
    return bytes.fromhex(disk.fingerprint(_written(path))) if (path / SETTINGS).exists() else bytes(32)


def checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint files of a run's folder, oldest first."""
    return sorted((path / "checkpoints").glob("[0-9]*.state"), key=round_of)


def evaluations(path: Path) -> list[Path]:
    """Return the evaluation files of a run's folder, oldest first."""
    return sorted((path / "eval").glob("[0-9]*.npz"), key=round_of)


def round_of(path: Path) -> int:
    """Return the round in the name of a checkpoint or evaluation file; -1 if the name is not a number."""
    return int(path.stem) if path.stem.isdecimal() else -1


def read_checkpoint(path: Path) -> bytearray:
    """Return the value of `write_checkpoint`; raise CoterieError if it is damaged or of a run with other settings."""
    blob = disk.read(path)
    content, whose, checksum = (memoryview(blob)[a:b] for a, b in ((0, -64), (-64, -32), (-32, None)))
    if len(blob) < 64 or disk.digest(content, whose, b"%d" % round_of(path)) != checksum:
        raise CoterieError(f"{path} is damaged: its checksum does not fit")
    if whose != settings_fingerprint(path.parent.parent):
        raise CoterieError(f"{path} is a checkpoint of another run, or of one with other settings")
    for view in (content, whose, checksum):
        view.release()
    del blob[-64:]
    return blob


@dataclass(frozen=True)
class Log:
    rows: list[dict[str, Any]]
    crc: int = 0  # checksum of the last row
    damage: str = ""  # one sentence


def read_log(path: Path, length: int | None = None) -> Log:
    """Return the sound rows of events.jsonl, without a last line that a crash cut short."""
    blob = bytes(disk.read(path)) if path.exists() else b""
    damage = f"{path} is shorter than the checkpoint says" if length is not None and len(blob) < length else ""
    *lines, rest = blob[:length].split(b"\n")
    if rest and (length is not None or b'"crc"' in rest):
        lines.append(rest)
    rows, crc = [], 0
    for number, line in enumerate(lines, 1):
        row = disk.unseal(line, crc)
        if row is None:
            damage = damage or f"{path} is damaged in line {number}"
            crc = disk.stated(line)
        else:
            rows.append(row[0])
            crc = row[1]
    return Log(rows, crc, damage)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the rows of events.jsonl in a run's folder; a last line that a crash cut short is left out.

    Raise CoterieError if other lines are damaged, so that no number is silently missing from a table.
    """
    log = read_log(path / EVENTS)
    saved = max((round_of(p) for p in checkpoints(path)), default=-1)
    damage = log.damage
    if not damage and (log.rows[-1]["round"] if log.rows else -1) < saved:
        damage = f"{path / EVENTS} ends before round {saved}, of which there is a checkpoint"
    if damage:
        raise CoterieError(f"{damage}; {how_to_mend(path)}")
    return log.rows


def how_to_mend(path: Path) -> str:
    """Return the advice for a run with damaged files."""
    return f"`coterie run --resume {path}` recomputes what is lost"


def more_log(path: Path, before: Log, at: int) -> tuple[Log, int]:
    """Return the result of `read_log` for a reader that has the first `at` bytes already; only the rest is read.

    A file that is shorter, or does not continue there, is read from its start.
    """
    size = path.stat().st_size if path.exists() else 0
    if at and not before.damage and size >= at:
        with path.open("rb") as f:
            f.seek(at)
            fresh = f.read()
        *lines, rest = fresh.split(b"\n")
        rows, crc = list(before.rows), before.crc
        for line in lines:
            row = disk.unseal(line, crc)
            if row is None:
                break
            rows.append(row[0])
            crc = row[1]
        else:
            return Log(rows, crc), at + len(fresh) - len(rest)
    length = disk.read(path).rfind(b"\n") + 1 if path.exists() else 0
    whole = read_log(path, length) if length else read_log(path)
    return whole, 0 if whole.damage else length


def writer(path: Path) -> int | None:
    """Return the process that has this run folder open, or None; the lock is inspected, never taken."""
    mac = sys.platform == "darwin"
    layout = "qqihh" if mac else "hhqqi4x"
    fields = (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET) if mac else (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with (path / "lock").open("rb") as f:
            lock = struct.unpack(layout, fcntl.fcntl(f, fcntl.F_GETLK, struct.pack(layout, *fields)))
    except OSError:
        return None
    kind, pid = (lock[3], lock[2]) if mac else (lock[0], lock[4])
    return None if kind == fcntl.F_UNLCK else int(pid)


def read_timing(path: Path) -> Log:
    """Return all sound rows of timing.jsonl."""
    lines = bytes(disk.read(path)).split(b"\n") if path.exists() else []
    unsealed = [disk.unseal(line, _TIMES) for line in lines]
    bad = [n for n, (line, row) in enumerate(zip(lines, unsealed, strict=True), 1) if row is None and line]
    return Log([row[0] for row in unsealed if row], 0, f"{path} is damaged in line {bad[0]}" if bad else "")


def evaluation_file(path: Path, round: int) -> Path:
    return path / "eval" / f"{round:06d}.npz"


def read_evaluation(path: Path, event: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of the evaluation that belongs to this event of the run in `path`."""
    file = evaluation_file(path, event["round"])
    blob = disk.read(file)
    if disk.digest(blob).hex() != event["evaluation"]:
        raise CoterieError(f"{file} is damaged: its checksum does not fit")
    with np.load(io.BytesIO(blob), allow_pickle=False) as z:
        return {k: z[k] for k in z.files}


def evaluation_damage(path: Path, events: list[dict[str, Any]]) -> list[str]:
    """Return one message for each evaluation that is missing or damaged."""
    out = []
    for event in events:
        if "evaluation" in event:
            try:
                read_evaluation(path, event)
            except CoterieError as e:
                out.append(str(e))
    return out


def _mend(path: Path, rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Rewrite the log with its intact rows, without damaged evaluations; return its length and last checksum."""
    lines, crc = [], 0
    for row in rows:
        if evaluation_damage(path, [row]):
            row = {k: v for k, v in row.items() if k != "evaluation"}
        line, crc = disk.seal(row, crc)
        lines.append(line)
    disk.write_atomic(path / EVENTS, b"".join(lines))
    return sum(map(len, lines)), crc


def _appending(path: Path, length: int) -> io.FileIO:
    """Open a log without buffering, so that a full disk raises where a line is written, not when the file is closed."""
    f = io.FileIO(path, "a")
    f.truncate(min(length, f.seek(0, os.SEEK_END)))
    f.seek(0, os.SEEK_END)
    return f


def _append(f: io.FileIO | None, line: bytes) -> None:
    assert f is not None, "open_logs comes first"
    while line:
        line = line[f.write(line) :]


def fresh_folder(name: str, root: Path = Path("runs")) -> Path:
    """Return runs/NAME-DATE-TIME, a folder that does not exist yet."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.split("/")[-1])
    base = root / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return path
