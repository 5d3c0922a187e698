"""Mistakes a person can mend: one sentence each, no trace."""

import difflib
from collections.abc import Iterable


class CoterieError(Exception):
    """Something the user can mend; the command line prints the sentence and exits with 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> CoterieError:
    """'unknown method "fedrp"; did you mean "fedrep"?'"""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f'did you mean "{near[0]}"?' if near else "known: " + ", ".join(names) + "."
    return CoterieError(f'unknown {kind} "{name}"; {hint}')
