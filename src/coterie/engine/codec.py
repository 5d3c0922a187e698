"""The one serialiser: nested values to bytes and back, for files, worker processes and other hosts.

A value is made of None, numbers, text, tensors, lists, dictionaries and registered dataclasses. Its bytes are a magic
word, the length of a JSON header, the header (the structure, and where each tensor lies) and the tensors. Nothing is
ever pickled. A tensor object that occurs several times is stored once; booleans are stored as bits.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.states import STATE_CLASSES
from coterie.core.tree import value_bytes
from coterie.errors import CoterieError
from coterie.storage.atomic import read, write_atomic

# None | bool | int | float | str | torch.dtype | Tensor | list | tuple | dict[str | int, Value] | registered dataclass
Value = Any

MAGIC = b"COTERIE1"
ALIGN = 64  # alignment of PyTorch's own allocator, so that every runtime computes on equally aligned tensors
FOREIGN = 2**23  # largest header from another host, in bytes
LEVELS = 64  # deepest nesting of a value from another host
DIMENSIONS = 32  # largest number of dimensions of a tensor in NumPy and PyTorch
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
_NAMES = {d: name for name, d in _DTYPES.items()}


class Encoding(NamedTuple):
    """A value before it is written: its header, its tensors, and their offsets."""

    header: bytes
    tensors: list[Tensor]
    offsets: list[int]
    size: int  # total number of bytes, header included


def encode(value: Value) -> Encoding:
    tensors: list[Tensor] = []
    index: dict[int, int] = {}
    skeleton = _split(value, tensors, index)
    places: list[list[Any]] = []
    offsets: list[int] = []
    at = 0
    for t in tensors:
        if t.dtype not in _NAMES:
            raise CoterieError(f"tensors of type {t.dtype} cannot be stored or sent")
        places.append([_NAMES[t.dtype], list(t.shape), at])
        offsets.append(at)
        at += -(-value_bytes(t.numel(), t.dtype) // ALIGN) * ALIGN
    header = json.dumps([skeleton, places], separators=(",", ":")).encode()
    start = -(-(16 + len(header)) // ALIGN) * ALIGN
    return Encoding(header, tensors, [start + o for o in offsets], start + at)


def _split(v: Value, tensors: list[Tensor], index: dict[int, int] | None) -> Any:
    """Return the JSON skeleton of a value; tensors are collected, with one index per tensor object."""
    if v is None or isinstance(v, bool | int | float | str):
        return v
    if isinstance(v, Tensor):
        at = len(tensors) if index is None else index.setdefault(id(v), len(tensors))
        if at == len(tensors):
            tensors.append(v)
        return {"t": at}
    if isinstance(v, list | tuple):
        return [_split(x, tensors, index) for x in v]
    if isinstance(v, Mapping):
        if all(isinstance(k, str) for k in v):
            return {"d": {k: _split(x, tensors, index) for k, x in v.items()}}
        return {"p": [[k, _split(x, tensors, index)] for k, x in v.items()]}
    if is_dataclass(v) and STATE_CLASSES.get(type(v).__name__) is type(v):
        return {"c": [type(v).__name__, *(_split(getattr(v, f.name), tensors, index) for f in fields(v))]}
    if isinstance(v, torch.dtype):
        return {"y": _NAMES[v]}
    raise CoterieError(f"state may hold numbers, text, tensors, lists and dictionaries, not {type(v).__name__}")


def write_into(made: Encoding, buffer: Any) -> None:
    """Write a value into the first `made.size` bytes of a writable buffer."""
    view = memoryview(buffer)
    view[:8] = MAGIC
    view[8:16] = len(made.header).to_bytes(8, "little")
    view[16 : 16 + len(made.header)] = made.header
    for t, at in zip(made.tensors, made.offsets, strict=True):
        if t.numel() and t.dtype == torch.bool:
            bits = np.packbits(t.detach().reshape(-1).numpy())
            view[at : at + len(bits)] = bits.data
        elif t.numel():
            torch.frombuffer(buffer, dtype=t.dtype, count=t.numel(), offset=at).view(t.shape).copy_(t.detach())


def pack(value: Value) -> memoryview:
    """Return the bytes of a value, with a single copy of its tensors."""
    made = encode(value)
    raw: Any = torch.zeros(made.size, dtype=torch.uint8).numpy()  # zeros between tensors: equal values, equal bytes
    write_into(made, raw)
    return memoryview(raw)


def unpack(buffer: Any, copy: bool = False, header: int | None = None, levels: int | None = None) -> Value:
    """Return the value of these bytes; its tensors are views of the buffer unless `copy` is set.

    `header` bounds the bytes of the header, which takes many times as much memory once it is parsed; `levels` bounds
    the nesting of lists and dictionaries, because later code recurses over the value.
    """
    try:
        view = memoryview(buffer)
        if bytes(view[:8]) != MAGIC:
            raise ValueError("it does not begin as Coterie's data do")
        start = 16 + int.from_bytes(view[8:16], "little")
        if start > len(view):
            raise ValueError("it is cut short")
        if header is not None and start - 16 > header:
            raise ValueError(f"its header has {start - 16} bytes, more than {header}")
        skeleton, places = json.loads(bytes(view[16:start]))
        if levels is not None:
            _check_levels(skeleton, levels)
        return _join(skeleton, _tensors(places, buffer, len(view), start, copy))
    except CoterieError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as e:
        raise CoterieError(f"damaged or foreign data: {str(e).partition(chr(10))[0]}") from e


def _tensors(places: Any, buffer: Any, length: int, start: int, copy: bool) -> list[Tensor]:
    """Return views of the tensors; each must lie inside the buffer and after the previous one."""
    tensors = []
    first, end = -(-start // ALIGN) * ALIGN, 0
    for name, shape, at in places:
        dtype = _DTYPES[name]
        if not all(type(n) is int and n >= 0 for n in (*shape, at)):
            raise ValueError("shapes and places must be whole numbers")
        if len(shape) > DIMENSIONS:
            raise ValueError(f"a tensor has {len(shape)} dimensions, more than {DIMENSIONS}")
        count = math.prod(shape)
        if at < end or at % ALIGN:
            raise ValueError("a tensor lies where none can be")
        end = at + value_bytes(count, dtype)
        if first + end > length:
            raise ValueError("a tensor does not lie inside the data")
        if not count:
            t = torch.zeros(shape, dtype=dtype)
        elif dtype == torch.bool:
            bits = np.frombuffer(buffer, np.uint8, (count + 7) // 8, first + at)
            t = torch.from_numpy(np.unpackbits(bits, count=count)).bool().view(shape)
        else:
            t = torch.frombuffer(buffer, dtype=dtype, count=count, offset=first + at).view(shape)
            t = t.clone() if copy else t
        tensors.append(t)
    return tensors


def _check_levels(s: Any, levels: int) -> None:
    """Raise CoterieError if JSON is nested too deeply; a dictionary or dataclass takes two or three levels."""
    inner = s.values() if isinstance(s, dict) else s if isinstance(s, list) else ()
    for x in inner:
        if isinstance(x, dict | list):
            if not levels:
                raise ValueError("it is nested too deep")
            _check_levels(x, levels - 1)


def _join(s: Any, tensors: list[Tensor]) -> Value:
    """Invert _split; tuples become lists."""
    if isinstance(s, list):
        return [_join(x, tensors) for x in s]
    if not isinstance(s, dict):
        return s
    ((mark, held),) = s.items()
    if mark == "t":
        if held < 0:
            raise ValueError("a tensor has a negative number")
        return tensors[held]
    if mark == "d":
        return {k: _join(x, tensors) for k, x in held.items()}
    if mark == "p":
        return {k: _join(x, tensors) for k, x in held}
    if mark == "c":
        return STATE_CLASSES[held[0]](*(_join(x, tensors) for x in held[1:]))
    if mark == "y":
        return _DTYPES[held]
    raise ValueError(f"unknown mark {mark!r}")


def unpack_foreign(buffer: Any) -> Value:
    """Return the value of bytes from another host, within the bounds FOREIGN and LEVELS."""
    return unpack(buffer, header=FOREIGN, levels=LEVELS)


# ---- in memory -------------------------------------------------------------------------------------------------------
def deep_copy(value: Value) -> Value:
    """Return a deep copy with tensors of its own."""
    return _clone(value, {})


def _clone(v: Value, done: dict[int, Tensor]) -> Value:
    if isinstance(v, Tensor):
        if id(v) not in done:
            done[id(v)] = v.detach().clone()
        return done[id(v)]
    if isinstance(v, Mapping):
        return {k: _clone(x, done) for k, x in v.items()}
    if isinstance(v, list | tuple):
        return [_clone(x, done) for x in v]
    if is_dataclass(v):
        return type(v)(*(_clone(getattr(v, f.name), done) for f in fields(v)))  # type: ignore[misc]
    return v


def moved(value: Value, device: torch.device, done: dict[int, tuple[Tensor, Tensor]]) -> Value:
    """Return the value with its tensors on the device; parts that are there already are the same objects.

    `done` holds the tensors that were moved before, with their copies; a tensor that occurs twice is moved once.
    """
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        if id(value) not in done:
            done[id(value)] = (value, value.detach().to(device))
        return done[id(value)][1]
    if isinstance(value, Mapping):
        items = {k: moved(x, device, done) for k, x in value.items()}
        return value if all(x is value[k] for k, x in items.items()) else items
    if isinstance(value, list | tuple):
        parts = [moved(x, device, done) for x in value]
        if all(x is y for x, y in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        new = {k: moved(x, device, done) for k, x in held.items()}
        return value if all(x is held[k] for k, x in new.items()) else replace(value, **new)
    return value


def tensors_of(value: Value) -> list[Tensor]:
    """Yield every tensor of a value once."""
    tensors: list[Tensor] = []
    _split(value, tensors, {})
    return tensors


def equal(a: Value, b: Value) -> bool:
    """True if both values have the same structure and the same bits."""
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    one, two = (json.dumps(_split(v, found, None), sort_keys=True) for v, found in ((a, ours), (b, theirs)))
    return one == two and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y))
        for x, y in zip(ours, theirs, strict=True)
    )


def _bits(t: Tensor) -> Tensor:
    """Return the bytes of a tensor, so that equal NaNs compare equal."""
    return t.detach().reshape(-1).contiguous().view(torch.uint8)


# ---- files -----------------------------------------------------------------------------------------------------------
def save(path: Path, value: Value, durable: bool = True, mode: int = 0o666) -> None:
    write_atomic(path, pack(value), durable, mode)


def read_value(path: Path) -> Value:
    blob = read(path)
    try:
        return unpack(blob)
    except CoterieError as e:
        raise CoterieError(f"{path} cannot be read: {e}") from e
