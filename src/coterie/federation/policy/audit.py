"""The audit log of a device, an edge or the cloud: what came, what left, for whom, and what was refused.

A line of JSON per message, appended and never changed. Each line ends in a hash of itself and of the line before, so a
line that was changed or taken out is noticed, unless everything after it was written anew as well: who needs more than
that writes down the last hash elsewhere. A process that was killed may leave its last line cut short; readers say so.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from coterie.errors import CoterieError
from coterie.storage import atomic as disk

AUDIT_FILE = "audit.jsonl"
Way = Literal["in", "out"]
_MARK = b', "chain": "'


@dataclass(frozen=True)
class AuditLine:
    """What happened with one message."""

    run: str
    round: int
    message: str  # hello, train, score, over
    way: Way  # as seen from here
    peer: str  # from whom, or for whom
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes by kind
    entries: Mapping[str, int] = field(default_factory=dict)  # bytes by name, where they are told
    about: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""  # by this host or by the other, with the reason; what a refused line has did not leave
    missing: str = ""  # why nothing came

    def fields(self) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        found = {"time": now, **vars(self)}
        return {k: v for k, v in found.items() if v not in ("", {})}


class AuditLog:
    """Appends lines; each is written at once."""

    def __init__(self, path: Path):
        self.path = path
        self._guard = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            old = path.read_bytes()
        except OSError as e:
            raise CoterieError(f"the audit log {path} cannot be used: {e.strerror or e}") from None
        self._torn = bool(old) and not old.endswith(b"\n")
        self._last = next((c for line in reversed(old.split(b"\n")[:-1]) if (c := _stated(line))), "")

    def write(self, *lines: AuditLine) -> None:
        if not lines:
            return
        with self._guard:
            last, out = self._last, [b"\n"] if self._torn else []
            for line in lines:
                body = json.dumps(disk.finite(line.fields())).encode()
                last = _chained(last, body)
                out.append(body[:-1] + _MARK + last.encode() + b'"}\n')
            blob = b"".join(out)
            try:
                self._torn = True  # until all of it is written
                while blob:
                    blob = blob[os.write(self._file, blob) :]
            except OSError as e:
                raise CoterieError(f"the audit log {self.path} cannot be written: {e.strerror or e}") from e
            self._last, self._torn = last, False

    def close(self) -> None:
        with self._guard:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


@dataclass
class AuditRecords:
    """An audit log as it was read."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)  # sentences
    torn: int = 0  # lines that were cut short when a process was killed
    chain: str = ""  # hash of the last line


def read_audit_log(path: Path) -> AuditRecords:
    raw = bytes(disk.read(path))
    found, cut = AuditRecords(), list[int]()
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line:
            continue
        body, mark, tail = line.rpartition(_MARK)
        stated = _stated(line)
        fields = _fields(body + b"}") if mark and stated else None
        if fields is None or tail != stated.encode() + b'"}':
            cut.append(number)
            continue
        if stated == _chained(found.chain, body + b"}"):
            found.torn += len(cut)
        else:
            where = f"line {number}" if not cut else f"lines {cut[0]} to {number}"
            found.damage.append(f"{path}: {where} was changed, or a line before was taken out")
        found.lines.append(fields)
        found.chain, cut = stated, []
    if cut == [raw.count(b"\n") + 1]:  # the last, without an end
        found.torn += 1
    elif cut:
        found.damage.append(f"{path}: line {cut[0]} was changed")
    return found


def locate_audit_log(path: Path) -> Path:
    """The log that a folder or a file name means."""
    for file in (path, path / AUDIT_FILE, path / "flower" / AUDIT_FILE):
        if file.is_file():
            return file
    below = sorted(str(p) for p in path.rglob(AUDIT_FILE)) if path.is_dir() else []
    if below:
        raise CoterieError(f"{path} has several audit logs; name one of {', '.join(below)}")
    raise CoterieError(f"{path} is or holds no audit log ({AUDIT_FILE})")


def _chained(before: str, body: bytes) -> str:
    return hashlib.blake2b(before.encode() + body, digest_size=16).hexdigest()


def _stated(line: bytes) -> str:
    """The hash that a whole line says it has; empty if it has none."""
    tail = line.rpartition(_MARK)[2]
    text = tail[:32].decode("ascii", "replace")
    return text if tail[32:] == b'"}' and len(text) == 32 and set(text) <= set("0123456789abcdef") else ""


def _fields(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


__all__ = ["AUDIT_FILE", "AuditLine", "AuditLog", "AuditRecords", "locate_audit_log", "read_audit_log"]
