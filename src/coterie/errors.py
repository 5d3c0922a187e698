"""Errors a user can fix: one sentence each, no traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class CoterieError(Exception):
    """An error the user can fix; the command line prints the sentence and exits with code 2."""


def sentence(text: str, most: int = 300) -> str:
    """Return text from a different host as one line without control characters, cut to `most` characters."""
    return printable(" ".join(text[:most].split()))


def printable(text: str) -> str:
    """Return the text with "?" in place of line breaks and control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def unknown(kind: str, name: str, known: Iterable[str]) -> CoterieError:
    """Return the error 'unknown method "fedrp"; did you mean "fedrep"?', with all choices if none is close."""
    names = sorted(set(known))
    spelled = {n.lower().replace("_", "-"): n for n in names}
    typed = str(name).lower().replace("_", "-")
    # a slip of the keyboard, then an abbreviation, then a name that is somewhat alike
    near = get_close_matches(typed, spelled, 1, 0.8)
    near = near or [form for form in spelled if len(typed) > 2 and form.startswith(typed)]
    words = typed.split("-")  # batch of batch_size, lr of learning_rate
    near = near or [form for form in spelled if words[1:] and form in (*words, "".join(w[:1] for w in words))]
    near = near or get_close_matches(typed, spelled, 1, 0.5 if len(typed) < 3 else 0.65)
    hint = f'did you mean "{spelled[near[0]]}"?' if near else "known: " + ", ".join(names) + "."
    return CoterieError(f'unknown {kind} "{name}"; {hint}')
