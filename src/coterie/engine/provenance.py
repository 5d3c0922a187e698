"""Where a user's own classes and functions come from, what their code is, and how they are found again."""

import hashlib
import importlib
import inspect
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def origin(thing: object) -> str:
    """module:name of a class or function, or of the class of anything else."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{getattr(named, '__qualname__', '')}"


def recalled(path: str) -> Any:
    """What module:name names; None where nobody could import it (a notebook, a function's inside, a lost file)."""
    module, _, name = path.partition(":")
    if module == "__main__" or "<" in name or not name:
        return None
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # as for models by name; last, so that it hides nothing
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # whatever a user's module raises: it cannot be found again
        return None
    return found


def code_digest(thing: object) -> str:
    """Of the code of a function, or of a class and its bases; of a module also of its parts' classes.

    Classes of Coterie, PyTorch and Python themselves are left out: their versions are recorded.
    """
    found = hashlib.blake2b(digest_size=16)
    roots = [type(m) for m in thing.modules()] if isinstance(thing, nn.Module) else [thing]
    seen: list[object] = []
    for root in roots:
        for part in root.__mro__ if isinstance(root, type) else [root]:
            if part not in seen and _is_users(part):
                seen.append(part)
                found.update(_code(part).encode())
    return found.hexdigest()


def _is_users(thing: object) -> bool:
    module = str(getattr(thing, "__module__", ""))
    return module.partition(".")[0] not in ("torch", "coterie", "builtins", "typing", "abc", "functools")


def _code(thing: object) -> str:
    """The source without comments at its ends, or the bytecode where there is no source."""
    try:
        return inspect.cleandoc(inspect.getsource(thing))  # type: ignore[arg-type]  # raises for what it does not know
    except (OSError, TypeError):
        parts = vars(thing).values() if isinstance(thing, type) else [thing]
        return "".join(_bytecode(p.__code__) for p in parts if isinstance(p, FunctionType))


def _bytecode(code: CodeType) -> str:
    inner = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_name}{code.co_code.hex()}{code.co_names}{inner}"


def plans_by_rounds(cls: type) -> bool:
    """Does a class use the number of rounds, as for a share of them? What only scores (deliver) does not count."""
    for part in cls.__mro__:
        for name, value in vars(part).items():
            inner = getattr(value, "fget", None) or getattr(value, "func", None) or value
            if name != "deliver" and isinstance(inner, FunctionType):
                names = inner.__code__.co_names
                if "rounds" in names and "ctx" in names:
                    return True
    return False
