"""Errors a user can fix: one sentence each, no traceback."""

from collections.abc import Iterable
from difflib import SequenceMatcher


class CoterieError(Exception):
    """An error the user can fix; the command line prints the sentence and exits with code 2."""


def sentence(text: str, most: int = 300) -> str:
    """Words of another host in one line, without anything that a terminal would obey."""
    return printable(" ".join(text[:most].split()))


def printable(text: str) -> str:
    """Without line breaks and control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def unknown(kind: str, name: str, known: Iterable[str]) -> CoterieError:
    """'unknown method "fedrp"; did you mean "fedrep"?', or all choices when none is close."""
    names = sorted(set(known))
    near = closest(name, names)
    hint = f'did you mean "{near}"?' if near else "known: " + ", ".join(names) + "."
    return CoterieError(f'unknown {kind} "{name}"; {hint}')


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one that a slip of the keyboard or an abbreviation turns into `name`."""
    plain = name.lower().replace("_", "-")
    found = {n: n.lower().replace("_", "-") for n in names}
    ranked = sorted((_edits(plain, f), -SequenceMatcher(None, plain, f).ratio(), n) for n, f in found.items())
    if ranked and ranked[0][0] <= (1 if len(plain) < 6 else 2):
        return ranked[0][2]
    starts = [n for n in names if len(plain) > 2 and n.lower().startswith(plain)]
    return starts[0] if starts else None


def _edits(a: str, b: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour to get from one word to the other."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            best = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before, last = last, row
    return last[-1]
