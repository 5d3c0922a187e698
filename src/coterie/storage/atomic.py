"""Atomic file writes and checksums: a file is complete or absent, and damage is reported."""

import hashlib
import json
import math
import os
import secrets
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError

Blob = bytes | bytearray | memoryview
TEMPORARY = ".*.tmp"  # temporary files that a killed process may leave behind
_MARK = b', "crc": "'
_MANY = 64  # up to this many files are synced one by one, more of them by one call


def write_atomic(path: Path, blob: Blob | Sequence[Blob], durable: bool = True, mode: int = 0o666) -> None:
    """Write the file atomically; with `durable` it also survives a power cut. The umask narrows the mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as f:
            f.writelines([blob] if isinstance(blob, Blob) else blob)
            if durable:
                f.flush()
                os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync(path.parent)


def sync(paths: Collection[Path]) -> None:
    """Make files that were written before survive a power cut."""
    if len(paths) > _MANY:
        os.sync()
        return
    for path in (*paths, *{p.parent for p in paths}):
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> bytearray:
    try:
        return bytearray(path.read_bytes())
    except FileNotFoundError:
        raise CoterieError(f"{path} is missing") from None
    except OSError as e:
        raise CoterieError(f"{path} cannot be read ({e.strerror or e})") from None


def digest(*parts: Blob) -> bytes:
    hashed = hashlib.blake2b(digest_size=32)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


# ---- JSON ------------------------------------------------------------------------------------------------------------
def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON that ends in a checksum of its content."""
    plain = json_values(content)
    text = json.dumps({**plain, "checksum": fingerprint(plain)}, indent=2, allow_nan=False)
    write_atomic(path, text.encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of `write_json` without the checksum; raise CoterieError if the file has changed."""
    try:
        content = json.loads(read(path))
    except (ValueError, RecursionError):  # neither JSON nor UTF-8
        raise CoterieError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(content, dict) or "checksum" not in content:
        raise CoterieError(f"{path} was damaged, edited or written by another version of Coterie: it has no checksum")
    if content.pop("checksum") != fingerprint(content):
        raise CoterieError(f"{path} was damaged or edited: its checksum does not fit")
    return content


def fingerprint(content: dict[str, Any]) -> str:
    """Return the checksum of JSON content, whatever its layout."""
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hex()


def seal(fields: dict[str, Any], before: int = 0) -> tuple[bytes, int]:
    """Return a line of JSON with a checksum that continues the previous line's, so that no line can be lost."""
    body = json.dumps(json_values(fields), allow_nan=False).encode()
    crc = zlib.crc32(body, before)
    return body[:-1] + _MARK + b'%08x"}\n' % crc, crc


def unseal(line: bytes, before: int = 0) -> tuple[dict[str, Any], int] | None:
    """Return the fields and the checksum of a sealed line; None if it is damaged or in the wrong place."""
    body, mark, tail = line.rpartition(_MARK)
    crc = zlib.crc32(body + b"}", before)
    if not mark or tail != b'%08x"}' % crc:
        return None
    fields: dict[str, Any] = json.loads(body + b"}")
    return fields, crc


def stated(line: bytes) -> int:
    """Return the checksum that a line states; 0 if it states none."""
    claim = line.rpartition(_MARK)[2][:8]
    try:
        return int(claim, 16)
    except ValueError:
        return 0


def json_values(value: Any) -> Any:
    """Return plain JSON values: lists for arrays, and None for NaN and infinity, which other languages cannot read."""
    if hasattr(value, "tolist"):  # an array of torch or numpy, which are not imported here because that takes seconds
        value = value.tolist()
    if isinstance(value, dict):
        return {k: json_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
