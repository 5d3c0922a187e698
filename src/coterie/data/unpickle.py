"""Read plain values from a pickle without loading it.

CIFAR's files are pickles of a dictionary of lists and arrays. This module interprets the opcodes itself. It knows
numbers, text, lists, tuples, dictionaries and numpy arrays and rejects everything else: nothing that a file names is
imported or called, not even by numpy.
"""

import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.errors import CoterieError


class _Name(tuple[str, str]):
    """A global that the pickle mentions; it is never imported."""


class _Dtype:
    def __init__(self, code: str):
        self.code, self.order = code, "|"


class _Array:
    def __init__(self) -> None:
        self.value: Any = None


_ARRAY = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
_BUFFER = {("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer")}  # protocol 5
_SKIP = {"PROTO", "FRAME", "STOP"}
_VALUES = {
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT",
    "BYTEARRAY8", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # strings of Python 2, read as bytes
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_MARK = object()


def plain_values(raw: bytes) -> Any:
    """Return the value that a pickle describes; raise ValueError or CoterieError for anything but plain values."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, arg, _ in pickletools.genops(raw):
            _step(opcode.name, arg, stack, memo)
        (value,) = stack
    except (IndexError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"malformed: {e!r}") from None
    if value is _MARK:
        raise ValueError("malformed: ends in a mark")
    return _final(value)


def _step(op: str, arg: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if op in _SKIP:
        return
    if op in _VALUES:
        stack.append(arg)
    elif op in _STRINGS:
        stack.append(arg.encode("latin-1"))
    elif op in _CONSTANTS:
        stack.append(_CONSTANTS[op]())
    elif op == "MARK":
        stack.append(_MARK)
    elif op in ("PUT", "BINPUT", "LONG_BINPUT"):
        memo[int(arg)] = stack[-1]
    elif op == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif op in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[int(arg)])
    elif op == "GLOBAL":
        stack.append(_Name(arg.split(" ", 1)))
    elif op == "STACK_GLOBAL":
        name = stack.pop()
        stack.append(_Name((stack.pop(), name)))
    elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
        n = int(op[-1])
        stack[-n:] = [tuple(stack[-n:])]
    elif op in ("TUPLE", "LIST", "DICT"):
        items = _marked(stack)
        pairs = zip(items[::2], items[1::2], strict=True)
        stack.append(tuple(items) if op == "TUPLE" else items if op == "LIST" else dict(pairs))
    elif op == "APPEND":
        value = stack.pop()
        _as(list, stack[-1]).append(value)
    elif op == "APPENDS":
        items = _marked(stack)
        _as(list, stack[-1]).extend(items)
    elif op == "SETITEM":
        value, key = stack.pop(), stack.pop()
        _as(dict, stack[-1])[key] = value
    elif op == "SETITEMS":
        items = _marked(stack)
        _as(dict, stack[-1]).update(zip(items[::2], items[1::2], strict=True))
    elif op == "REDUCE":
        args, function = stack.pop(), stack.pop()
        stack.append(_construct(function, args))
    elif op == "BUILD":
        state = stack.pop()
        _build(stack[-1], state)
    else:
        raise CoterieError(f"it uses {op}, which plain values do not need")


def _construct(function: Any, args: Any) -> Any:
    """Return the value of one of the few calls in the pickle of an array, without making the call."""
    if isinstance(function, _Name):
        if tuple(function) in _ARRAY:
            return _Array()
        if tuple(function) in _BUFFER:
            data, dtype, shape, order = args
            array = _Array()
            _build(array, (None, shape, dtype, order == "F", bytes(data)))
            return array
        if tuple(function) == ("numpy", "dtype"):
            return _Dtype(args[0].decode("ascii") if isinstance(args[0], bytes) else str(args[0]))
        if tuple(function) == ("_codecs", "encode") and args[1:] in (("latin1",), ("latin-1",)):
            return args[0].encode("latin-1")  # how Python 3 writes bytes for Python 2
        raise CoterieError(f"it wants to call {'.'.join(function)}, which plain values do not need")
    raise CoterieError("it wants to call something that plain values do not need")


def _build(target: Any, state: Any) -> None:
    if isinstance(target, _Dtype):
        target.order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
    elif isinstance(target, _Array):
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.code[0] not in "biuf" or not isinstance(data, bytes):
            raise CoterieError("it holds an array of something other than numbers")
        order = dtype.order if dtype.order in "<>=|" else "="
        flat = np.frombuffer(data, np.dtype(order + dtype.code))
        target.value = flat.reshape(shape, order="F" if fortran else "C")
    else:
        raise CoterieError("it sets the state of an object that plain values do not need")


def _marked(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise ValueError("malformed: no mark")
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"malformed: {type(value).__name__} where a {kind.__name__} should be")
    return value


def _final(value: Any) -> Any:
    """Replace placeholders of arrays at the top level by the arrays."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict):
        return {k: v.value if isinstance(v, _Array) else v for k, v in value.items()}
    return value
