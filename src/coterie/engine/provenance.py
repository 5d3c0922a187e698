"""Origin of a user's own classes and functions: their names, digests of their code, and importing them again."""

import ast
import hashlib
import importlib.util
import inspect
import io
import sys
import tokenize
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def origin(thing: object) -> str:
    """Return module:name of a class or function, or of the class of any other object."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{getattr(named, '__qualname__', '')}"


def import_named(path: str) -> Any:
    """Import the object that `package.module:name` names; modules in the current folder are found too."""
    module, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # commands do not search it by default; last, so that it hides no module
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def recalled(path: str) -> Any:
    """Import module:name; return None if that fails (a notebook, a local function, a lost file)."""
    module, _, name = path.partition(":")
    if module == "__main__" or "<" in name or not name:
        return None
    try:
        return import_named(path)
    except Exception:  # whatever a user's module raises: it cannot be found again
        return None


def code_digest(thing: object) -> str:
    """Return a digest of the code of a function, of a class and its bases, or of the classes of a module's parts.

    Classes of Coterie, PyTorch and Python are left out, because their versions are recorded.
    """
    digest = hashlib.blake2b(digest_size=16)
    roots = [type(m) for m in thing.modules()] if isinstance(thing, nn.Module) else [thing]
    seen: list[object] = []
    for root in roots:
        for part in root.__mro__ if isinstance(root, type) else [root]:
            if part not in seen and _is_users(part):
                seen.append(part)
                digest.update(_code(part).encode())
    return digest.hexdigest()


def method_digest(method: type) -> str:
    """Return a digest of the source code of a method, by which hosts can tell whether theirs is the same."""
    return source_digest([method])


def model_digest(module: nn.Module, made_by: object = None) -> str:
    """Return a digest of the source code of a model: its parts' classes and the function that made it, if any."""
    parts: list[object] = list(dict.fromkeys(type(part) for part in module.modules()))
    made = [made_by] if isinstance(made_by, type | FunctionType) else []
    return source_digest(parts + made)


def source_digest(roots: Sequence[object]) -> str:
    """Return a digest of the source code of classes and functions.

    It covers their modules and those of the bases of classes and, transitively, the modules that these import from
    `coterie.methods`, `coterie.models`, `coterie.parts` and their own top-level packages. Compiled modules, comments
    and docstrings are left out.
    """
    things = [part for root in roots for part in (root.__mro__ if isinstance(root, type) else [root])]
    things = [thing for thing in dict.fromkeys(things) if _top_level(_module_of(thing)) not in _KNOWN_BY_VERSION]
    own = {_top_level(_module_of(thing)) for thing in things} - {"coterie"}
    sources: dict[str, str] = {}
    pending = [_module_of(thing) for thing in things]
    while pending:
        name = pending.pop()
        if name not in sources and (module := _read_module(name)) is not None:
            sources[name], package = module
            pending += [
                other
                for other in _imports(sources[name], package)
                if other.startswith(_FOLLOWED) or _top_level(other) in own
            ]
    code = {name: _without_prose(source) for name, source in sources.items()}
    code["names"] = " ".join(map(origin, things))
    code |= {origin(thing): _code(thing) for thing in things if _module_of(thing) not in sources}
    digest = hashlib.sha256()
    for name in sorted(code):
        digest.update(f"{name} {len(code[name])}\n{code[name]}".encode())
    return digest.hexdigest()


_FOLLOWED = ("coterie.methods.", "coterie.models.", "coterie.parts.")
# top-level packages that are not digested: their versions are recorded
_KNOWN_BY_VERSION = {"torch", *sys.stdlib_module_names}


def _top_level(module: str) -> str:
    return module.partition(".")[0]


def _module_of(thing: object) -> str:
    return str(getattr(thing, "__module__", ""))


def _read_module(name: str) -> tuple[str, str] | None:
    """Return a module's source code, read again from its file, and its package; None for a module without source."""
    try:
        spec = importlib.util.find_spec(name)
        source: str | None = spec.loader.get_source(name)  # type: ignore[union-attr]  # AttributeError: no source
    except Exception:  # not only ImportError: a user's package may raise anything while it is imported
        return None
    return None if spec is None or source is None else (source, spec.parent or "")


@cache
def _imports(source: str, package: str) -> tuple[str, ...]:
    """Return the names of everything that source code in a package imports: modules, and names that may be modules."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(names)


@cache
def _without_prose(source: str) -> str:
    """Return source code without comments, docstrings and blank lines. It does not depend on the version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[:1] if ast.get_docstring(node) is not None else []
            for line in range(docstring[0].lineno, (docstring[0].end_lineno or 0) + 1) if docstring else ():
                lines[line - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _is_users(thing: object) -> bool:
    return _top_level(_module_of(thing)) not in ("torch", "coterie", "builtins", "typing", "abc", "functools")


def _code(thing: object) -> str:
    """Return the source code, or the bytecode of an object without source."""
    try:
        return inspect.cleandoc(inspect.getsource(thing))  # type: ignore[arg-type]  # raises for unknown objects
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # no source, or not that of this code
        parts = vars(thing).values() if isinstance(thing, type) else [thing]
        return "".join(_bytecode(p.__code__) for p in parts if isinstance(p, FunctionType))


def _bytecode(code: CodeType) -> str:
    inner = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_name}{code.co_code.hex()}{code.co_names}{inner}"
