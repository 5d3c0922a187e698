"""Find the functions that compute the equations and algorithm lines of a paper, in the docstrings and comments of code.

A mark such as "equations (6) to (8)" or "Algorithm 2, line 4" in the folder of a paper's method belongs to the
innermost function or class around it. A mark in any other folder names the method: "FedCPMD's equation (8)". The files
in the folder `equations` list the papers' numbers, with the reason where a number has no function.
"""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.methods import find
from coterie.papers.presets import PAPERS

_ROOT = Path(__file__).parents[1]  # folder of the package
_LIST = r"(?:(?:\s*,\s*(?:and\s+)?|\s+(?:and|to)\s+)(?:and\s+)?{0})*"
_OWNER = r"(?:(?P<owner>[\w-]+)'s\s+)?"
_EQUATION = re.compile(_OWNER + r"[Ee]quations?\s+(?P<list>\(\d+\)" + _LIST.format(r"\(\d+\)") + ")")
_ALGORITHM = re.compile(
    _OWNER + r"[Aa]lgorithm\s+(?P<number>\d+),\s+lines?\s+(?P<list>\d+" + _LIST.format(r"\d+(?!\w)") + ")"
)
Place = tuple[int, int]  # number of the algorithm (0: equations), and number of the equation or line


@dataclass(frozen=True)
class Line:
    """An equation or a line of an algorithm: what it does in a few words, and the functions that do it."""

    place: Place
    words: str
    functions: tuple[str, ...]  # "text.py: FedCPMD.merge"
    reason: str  # reason for a missing function

    @property
    def name(self) -> str:
        algorithm, number = self.place
        return f"Algorithm {algorithm}, line {number}" if algorithm else f"({number})"


def equation_map(paper: str) -> list[Line]:
    """Return all numbered equations and algorithm lines of a paper, with the functions that compute them."""
    about = _numbered(paper)
    marked = _marks(paper)
    reasons = {place: why for key, why in about["without"].items() for place in places(key, "")}
    texts = {(0, i): words for i, words in enumerate(about["equations"], 1)}
    for number, lines in about["algorithms"].items():
        texts |= {(int(number), i): words for i, words in enumerate(lines, 1)}
    if unknown := [p for p in (*marked, *reasons) if p not in texts]:
        where = ", ".join(f for p in unknown for f in marked.get(p, ("the list of reasons",)))
        raise CoterieError(f"{about['title']} has no equation or line {unknown[0]}, which is named in {where}")
    return [Line(p, words, tuple(marked.get(p, ())), reasons.get(p, "")) for p, words in texts.items()]


def paper_of(method: str) -> str:
    """Return the paper of a method or of the method that it varies; raise CoterieError for other methods."""
    module = find(method).__module__
    for paper in PAPERS:
        if f"{module}.".startswith(f"coterie.methods.{_folder(paper)}."):
            return paper
    raise CoterieError(f"{method} is not a method of the papers {', '.join(PAPERS)}")


def places(text: str, *owners: str) -> list[Place]:
    """Return the equations and lines that a text names as an owner's; "" is the owner of marks without a name."""
    out = []
    for pattern in (_EQUATION, _ALGORITHM):
        for mark in pattern.finditer(text):
            if (mark["owner"] or "") in owners:
                algorithm = int(mark["number"]) if pattern is _ALGORITHM else 0
                out += [(algorithm, n) for n in _numbers(mark["list"])]
    return out


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list such as "(2), (4) to (6) and (8)"."""
    out: list[int] = []
    for joint, number in re.findall(r"(to)?\s*\(?(\d+)\)?", text):
        out += range(out[-1] + 1, int(number) + 1) if joint else [int(number)]
    return out


def _folder(paper: str) -> str:
    return paper.replace("-", "")


@cache
def _numbered(paper: str) -> dict[str, Any]:
    return tomllib.loads((files("coterie.papers") / "equations" / f"{paper}.toml").read_text())


def _marks(paper: str) -> dict[Place, list[str]]:
    """Return place -> functions, those of the paper's own folder first."""
    own, title = _ROOT / "methods" / _folder(paper), str(_numbered(paper)["title"])
    out: dict[Place, list[str]] = {}
    for path in [*sorted(own.glob("*.py")), *sorted(p for p in _ROOT.rglob("*.py") if p.parent != own)]:
        source = path.read_text()
        inside = path.parent == own
        if (not inside and f"{title}'s" not in source) or path.stem == "mended":  # mended methods are Coterie's own
            continue
        for function, text in _texts(source):
            if not function:
                continue  # a module's docstring
            for place in places(text, title, *([""] if inside else [])):
                name = f"{path.name if inside else path.relative_to(_ROOT)}: {function}"
                if name not in out.setdefault(place, []):
                    out[place].append(name)
    return out


def _texts(source: str) -> Iterator[tuple[str, str]]:
    """Yield every docstring and comment with the name of the innermost function or class around it."""
    scopes: list[tuple[int, int, str]] = [(1, len(source.splitlines()) + 1, "")]
    docs: list[tuple[str, str]] = []

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}" if name else child.name
                scopes.append((child.lineno, child.end_lineno or child.lineno, inner))
                docs.append((inner, ast.get_docstring(child) or ""))
            visit(child, inner)

    visit(ast.parse(source), "")
    yield from docs
    for row, comment in _comments(source):
        yield min((b - a, name) for a, b, name in scopes if a <= row <= b)[1], comment


def _comments(source: str) -> list[tuple[int, str]]:
    """Return (row, text) of the comments; a comment of several lines is one text."""
    out: list[tuple[int, str]] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, text = token.start[0], token.string.lstrip("# ")
            whole_line = token.line.lstrip().startswith("#")
            if out and whole_line and row == last + 1:
                out[-1] = (out[-1][0], f"{out[-1][1]} {text}")
            else:
                out.append((row, text))
            last = row
    return out
