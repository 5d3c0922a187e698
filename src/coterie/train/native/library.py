"""The compiled kernels of the extension module: which instruction set is used, and the structures that they take."""

import ctypes
import importlib.util
import os
from ctypes import POINTER, c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

INSTRUCTION_SETS = ("avx512", "avx2", "neon", "baseline")  # best first
MODULE = "coterie.train.native._kernels"
DONE = 0  # status of a call that accepted its arguments


class Call(ctypes.Structure):
    """Arguments of one forward or backward call of a block, with the fields of `call` in block.c."""

    _fields_ = (
        *((name, c_int64) for name in ("n", "ic", "h", "w", "oc", "k", "pad", "mode", "keep")),
        ("eps", c_double),
        ("momentum", c_double),
        *((name, c_void_p) for name in ("x", "weight", "bias", "gamma", "beta", "running_mean", "running_var")),
        *((name, c_void_p) for name in ("y", "save", "scratch")),
        *((name, c_void_p) for name in ("dy", "dx", "dw", "db", "dgamma", "dbeta")),
    )


class Layer(ctypes.Structure):
    """A layer of a chain, with the fields of `layer` in layers.c."""

    _fields_ = (
        *((name, c_int64) for name in ("kind", "ic", "h", "w", "oc", "oh", "ow")),
        *((name, c_int64) for name in ("kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw", "groups", "mode")),
        *((name, c_int64) for name in ("weight", "bias", "gamma", "beta", "mean", "var")),
        ("eps", c_double),
        ("momentum", c_double),
    )


class ModelEntry(ctypes.Structure):
    """A tensor of a chain's model, with the fields of `entry` in chain.c."""

    _fields_ = (*((name, c_int64) for name in ("size", "outputs", "trained", "pulled")), ("decay", c_double))


class Chain(ctypes.Structure):
    """A model, with the fields of `chain` in chain.c."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "entries", "loss", "item", "outputs")),
        ("layer", c_void_p),
        ("entry", c_void_p),
    )


class Training(ctypes.Structure):
    """Arguments of a local training, with the fields of `training` in chain.c."""

    _fields_ = (
        ("chain", c_void_p),
        ("samples", c_int64),
        *((name, c_void_p) for name in ("x", "y", "order", "spans")),
        ("batches", c_int64),
        ("steps", c_int64),
        ("lr", c_void_p),
        ("optimiser", c_int64),
        ("nesterov", c_int64),
        *((name, c_double) for name in ("momentum", "beta1", "beta2", "eps", "clip", "pull")),
        *((name, c_void_p) for name in ("value", "anchor", "first", "second", "count")),
        ("loss", c_double),
    )


class Scoring(ctypes.Structure):
    """Arguments of a scoring, with the fields of `scoring` in chain.c."""

    _fields_ = (
        ("chain", c_void_p),
        ("samples", c_int64),
        *((name, c_void_p) for name in ("x", "y", "value", "outputs", "hits", "total")),
        ("loss", c_double),
    )


class UnavailableError(Exception):
    """The kernels cannot be used; the message says why in a few words."""


@dataclass(frozen=True)
class Library:
    """The functions for one instruction set."""

    instructions: str
    sizes: Any
    forward: Any
    backward: Any
    train: Any
    score: Any


def _path() -> str | None:
    spec = importlib.util.find_spec(MODULE)
    return None if spec is None else spec.origin


def _extension() -> ctypes.CDLL:
    if (path := _path()) is None:
        raise UnavailableError("the extension was not built when Coterie was installed (no C compiler?)")
    try:
        return ctypes.CDLL(path)
    except OSError as e:
        raise UnavailableError(f"the extension cannot be loaded ({str(e)[:80]})") from None


def usable_instructions() -> list[str]:
    """Return the instruction sets of both the processor and the extension, best first; empty without an extension."""
    try:
        lib = _extension()
    except UnavailableError:
        return []
    return [s for s in INSTRUCTION_SETS if lib.coterie_supports(s.encode()) and hasattr(lib, f"coterie_train_{s}")]


def open_library(wanted: str | None = None) -> Library:
    """Return the kernels for an instruction set, by default the best; raise UnavailableError if they are missing."""
    lib, usable = _extension(), usable_instructions()
    if wanted is not None and wanted not in usable:
        raise UnavailableError(f"COTERIE_NATIVE = {wanted}, and this processor has {', '.join(usable)}")
    name = wanted or usable[0]

    def function(kind: str, result: Any, *arguments: Any) -> Any:
        f = getattr(lib, f"coterie_{kind}_{name}")
        f.argtypes, f.restype = list(arguments), result
        return f

    call = POINTER(Call)
    return Library(
        name,
        function("sizes", None, call, POINTER(c_int64)),
        function("forward", None, call),
        function("backward", None, call),
        function("train", c_int64, POINTER(Training)),
        function("score", c_int64, POINTER(Scoring)),
    )


def wanted_instructions() -> str | None:
    """Return the instruction set that COTERIE_NATIVE names; None: the best one."""
    text = os.environ.get("COTERIE_NATIVE", "").lower()
    return text if text in INSTRUCTION_SETS else None
