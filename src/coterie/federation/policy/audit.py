"""The audit log of a device, an edge or the cloud: messages that came, left or were refused.

The log has one line of JSON per message; lines are appended and never changed. Each line ends with a hash of itself
and of the line before. Readers therefore notice a changed or removed line, unless all later lines were rewritten; to
exclude that, keep a copy of the last hash elsewhere. A killed process may leave its last line incomplete; readers
report it.

A file of MAX_BYTES is renamed to audit.jsonl.1, .2, and so on, and a new one begins with a line that repeats the last
hash. The operator may move the numbered files away, the oldest first.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from coterie.errors import CoterieError
from coterie.storage import atomic as disk

AUDIT_FILE = "audit.jsonl"
_HASH_MARK = b', "chain": "'
MAX_BYTES = 64 * 2**20  # size at which a new file is begun
_TAIL_BYTES = 2**20  # bytes at the end of a file in which its last complete line is looked for first


@dataclass(frozen=True)
class AuditLine:
    """The record of one message."""

    run: str
    round: int
    message: str  # hello, train, score, send or over
    way: Literal["in", "out"]  # seen from this host
    peer: str  # the sender or the receiver
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes by kind
    entries: Mapping[str, int] = field(default_factory=dict)  # bytes by name of the payload entry, if recorded
    about: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""  # the reason, if this host or the other refused the message; a refused message did not leave
    missing: str = ""  # the reason, if no answer came

    def fields(self) -> dict[str, Any]:
        """Return the fields of the line, without empty ones, and the time."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return {k: v for k, v in {"time": now, **vars(self)}.items() if v not in ("", {})}


class AuditLog:
    """Appends lines to an audit log; each is written immediately."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self._open()
            self._size = path.stat().st_size
            self._last, self._torn = _read_end(path, self._size)
        except OSError as e:
            raise CoterieError(f"the audit log {path} cannot be used: {e.strerror or e}") from None

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, *lines: AuditLine) -> None:
        """Append lines; raise CoterieError if that fails."""
        if not lines:
            return
        with self._lock:
            try:
                if self._size >= MAX_BYTES and not self._torn:
                    self._begin_file()
                self._append([disk.json_values(line.fields()) for line in lines])
            except OSError as e:
                raise CoterieError(f"the audit log {self.path} cannot be written: {e.strerror or e}") from e

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        last, chunks = self._last, [b"\n"] if self._torn else []
        for line in lines:
            body = json.dumps(line).encode()
            last = _chain_hash(last, body)
            chunks.append(body[:-1] + _HASH_MARK + last.encode() + b'"}\n')
        blob = b"".join(chunks)
        self._torn = True  # until all of it is written
        self._size += len(blob)
        while blob:
            blob = blob[os.write(self._file, blob) :]
        self._last, self._torn = last, False

    def _begin_file(self) -> None:
        number = max((n for n, _ in _numbered(self.path)), default=0) + 1
        self.path.rename(f"{self.path}.{number}")
        os.close(self._file)
        self._file, self._size = self._open(), 0
        self._append([{"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "continues": self._last}])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


@dataclass
class AuditRecords:
    """The content of an audit log."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)  # messages about changed or removed lines
    torn: int = 0  # incomplete lines of killed processes
    chain: str = ""  # hash of the last line


def read_audit_log(path: Path) -> AuditRecords:
    """Read an audit log, with the numbered files before it, and check its hashes."""
    records = AuditRecords()
    for file in [*(file for _, file in sorted(_numbered(path))), path]:
        _read_file(file, records)
    return records


def _read_file(path: Path, records: AuditRecords) -> None:
    raw, unreadable = bytes(disk.read(path)), list[int]()
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line:
            continue
        body, mark, tail = line.rpartition(_HASH_MARK)
        stated = _stated_hash(line)
        fields = _parse(body + b"}") if mark and stated else None
        if fields is None or tail != stated.encode() + b'"}':
            unreadable.append(number)
            continue
        if "continues" in fields and not records.chain and not records.lines:
            records.chain = str(fields["continues"])  # the files before this one were moved away
        if stated == _chain_hash(records.chain, body + b"}"):
            records.torn += len(unreadable)
        else:
            where = f"lines {unreadable[0]} to {number}" if unreadable else f"line {number}"
            records.damage.append(f"{path}: {where} was changed, or an earlier line was removed")
        if "continues" not in fields:
            records.lines.append(fields)
        records.chain, unreadable = stated, []
    if unreadable == [raw.count(b"\n") + 1]:  # the last line, without its end
        records.torn += 1
    elif unreadable:
        records.damage.append(f"{path}: line {unreadable[0]} was changed")


def _numbered(path: Path) -> list[tuple[int, Path]]:
    """Return the files that were begun before this one, with their numbers."""
    suffixes = ((file.name.removeprefix(f"{path.name}."), file) for file in path.parent.glob(f"{path.name}.*"))
    return [(int(number), file) for number, file in suffixes if number.isdigit()]


def _read_end(path: Path, size: int) -> tuple[str, bool]:
    """Return the hash of the last complete line, and whether an incomplete line follows it."""
    length = min(size, _TAIL_BYTES)
    while True:
        with path.open("rb") as f:
            f.seek(size - length)
            end = f.read(length)
        last = next((h for line in reversed(end.split(b"\n")[:-1]) if (h := _stated_hash(line))), "")
        if last or length == size:
            return last, bool(end) and not end.endswith(b"\n")
        length = min(size, 4 * length)


def locate_audit_log(path: Path) -> Path:
    """Return the audit log that a file name or a folder of a run, a device or an edge stands for."""
    for file in (path, path / AUDIT_FILE, *(path / folder / AUDIT_FILE for folder in ("federation", "flower"))):
        if file.is_file():
            return file
    below = sorted(str(p) for p in path.rglob(AUDIT_FILE)) if path.is_dir() else []
    if below:
        raise CoterieError(f"{path} has several audit logs; name one of {', '.join(below)}")
    raise CoterieError(f"{path} is not an audit log and contains none ({AUDIT_FILE})")


def _chain_hash(before: str, body: bytes) -> str:
    return hashlib.blake2b(before.encode() + body, digest_size=16).hexdigest()


def _stated_hash(line: bytes) -> str:
    """Return the hash at the end of a complete line; empty if it has none."""
    tail = line.rpartition(_HASH_MARK)[2]
    text = tail[:32].decode("ascii", "replace")
    return text if tail[32:] == b'"}' and len(text) == 32 and set(text) <= set("0123456789abcdef") else ""


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None
