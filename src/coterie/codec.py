"""Nested values (dict, list, numbers, text, tensors) to and from safetensors: the only file and wire format for state.

Nothing is ever pickled: the structure is JSON in the file's metadata, the tensors lie beside it.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from coterie.errors import CoterieError

Value = Any  # None | bool | int | float | str | Tensor | list[Value] | dict[str | int, Value]


def split(value: Value) -> tuple[Any, list[Tensor]]:
    """A JSON skeleton and the tensors it points at."""
    tensors: list[Tensor] = []

    def walk(v: Value) -> Any:
        if isinstance(v, Tensor):
            tensors.append(v)
            return {"t": len(tensors) - 1}
        if v is None or isinstance(v, bool | int | float | str):
            return v
        if isinstance(v, list | tuple):
            return [walk(x) for x in v]
        if isinstance(v, dict):
            if all(isinstance(k, str) for k in v):
                return {"d": {k: walk(x) for k, x in v.items()}}
            return {"p": [[k, walk(x)] for k, x in v.items()]}
        raise CoterieError(f"state may hold numbers, text, tensors, lists and dictionaries, not {type(v).__name__}")

    return walk(value), tensors


def join(skeleton: Any, tensors: list[Tensor]) -> Value:
    """Inverse of split (tuples come back as lists)."""

    def walk(s: Any) -> Value:
        if isinstance(s, list):
            return [walk(x) for x in s]
        if isinstance(s, dict):
            if "t" in s:
                return tensors[s["t"]]
            if "d" in s:
                return {k: walk(x) for k, x in s["d"].items()}
            return {k: walk(x) for k, x in s["p"]}
        return s

    return walk(skeleton)


def dumps(value: Value, **metadata: str) -> bytes:
    skeleton, tensors = split(value)
    named = {str(i): t.detach().contiguous() for i, t in enumerate(_unshared(tensors))}
    return save_bytes(named, {"skeleton": json.dumps(skeleton), **metadata})


def loads(blob: bytes) -> Value:
    try:
        tensors = load_bytes(blob)
        size = int.from_bytes(blob[:8], "little")
        meta = json.loads(blob[8 : 8 + size]).get("__metadata__", {})
        return join(json.loads(meta["skeleton"]), [tensors[str(i)] for i in range(len(tensors))])
    except (SafetensorError, KeyError, ValueError, IndexError) as e:
        raise CoterieError(f"damaged or foreign data: {e}") from e


def _unshared(tensors: list[Tensor]) -> list[Tensor]:
    """safetensors refuses tensors that share storage: views and repeated tensors are copied."""
    out: list[Tensor] = []
    seen: set[int] = set()
    for t in tensors:
        at = t.untyped_storage().data_ptr()
        shared = t._base is not None or t.untyped_storage().nbytes() != t.nbytes or at in seen
        seen.add(at)
        out.append(t.clone() if shared else t)
    return out


def write_atomic(path: Path, blob: bytes, durable: bool = True) -> None:
    """The file is there whole or not at all; `durable` also survives a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(blob)
            if durable:
                f.flush()
                os.fsync(f.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def save(path: Path, value: Value, durable: bool = True, **metadata: str) -> None:
    write_atomic(path, dumps(value, **metadata), durable)


def load(path: Path) -> Value:
    try:
        return loads(path.read_bytes())
    except CoterieError as e:
        raise CoterieError(f"{path} cannot be read: {e}") from e


def metadata(path: Path) -> dict[str, str]:
    with safe_open(str(path), framework="pt") as f:
        return dict(f.metadata() or {})


def equal(a: Value, b: Value) -> bool:
    """Same structure and the same bits."""
    sa, ta = split(a)
    sb, tb = split(b)
    return bool(sa == sb) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y))
        for x, y in zip(ta, tb, strict=True)
    )


def _bits(t: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals NaN, and nothing else does."""
    return t.detach().reshape(-1).contiguous().view(torch.uint8)
