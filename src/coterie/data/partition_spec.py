"""Parse partition schemes and schedules with their parameters: dirichlet(0.1), rotate(K=4), swap_labels(10)."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from coterie.errors import CoterieError, unknown

SchemeKind = Literal["partition", "timeline"]
# Parameters of each scheme: name, type, default (None: required).
_PARAMETERS: dict[SchemeKind, dict[str, tuple[tuple[str, type, float | None], ...]]] = {
    "partition": {
        "iid": (),
        "dirichlet": (("alpha", float, None),),
        "exdir": (("C", int, None), ("alpha", float, None)),
        "labels": (("k", int, None),),
        "shards": (("s", int, None),),
        "rotate": (("K", int, None), ("alpha", float, 1.0)),
        "natural": (),
    },
    "timeline": {
        "swap_labels": (("round", int, None), ("share", float, 1.0)),
        "rotate": (("round", int, None), ("degrees", float, 90.0), ("share", float, 1.0)),
        "new_labels": (("round", int, None),),
        "move_data": (("round", int, None),),
    },
}
_EXAMPLES = {
    "dirichlet": "dirichlet(0.1)", "exdir": "exdir(2, 0.5)", "labels": "labels(2)", "shards": "shards(2)",
    "rotate": "rotate(4)", "swap_labels": "swap_labels(10)", "new_labels": "new_labels(10)",
    "move_data": "move_data(10)",
}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """The name of a partition scheme or schedule and the values of its parameters."""

    name: str
    args: tuple[tuple[str, float], ...] = ()

    def __getitem__(self, parameter: str) -> float:
        return dict(self.args)[parameter]

    def __str__(self) -> str:
        return self.name + (f"({', '.join(f'{v:g}' for _, v in self.args)})" if self.args else "")


def parse_scheme(text: str, what: SchemeKind = "partition") -> Scheme:
    """Parse a scheme, fill in defaults and check every parameter."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", text)
    if match is None:
        example = "dirichlet(0.1)" if what == "partition" else "swap_labels(10)"
        raise CoterieError(f'{what} "{text}" is not of the form name or name(value, ...), such as {example}')
    name, known = match[1].lower(), _PARAMETERS[what]
    if name not in known:
        raise unknown(what, name, known)
    whole = f'{what} "{text}"'
    values = [p.strip() for p in (match[2] or "").split(",") if p.strip()]
    given = _given(whole, values, [p[0] for p in known[name]])
    args = []
    for parameter, kind, default in known[name]:
        if parameter not in given and default is None:
            raise CoterieError(f"{whole} needs {parameter}, for example {_EXAMPLES[name]}")
        args.append((parameter, _number(whole, parameter, given[parameter], kind) if parameter in given else default))
    return Scheme(name, tuple((p, v) for p, v in args if v is not None))


def _given(whole: str, parts: list[str], names: list[str]) -> dict[str, str]:
    """Return the values by parameter name; they are given by position or by name."""
    if len(parts) > len(names):
        takes = f"takes {', '.join(names)}" if names else "takes no parameters"
        raise CoterieError(f"{whole} has too many values: it {takes}")
    given = {}
    lower = {n.lower(): n for n in names}
    for position, part in enumerate(parts):
        key, equals, value = part.partition("=")
        if equals and key.strip().lower() not in lower:
            raise unknown(f"parameter in {whole}:", key.strip(), names)
        given[lower[key.strip().lower()] if equals else names[position]] = value if equals else part
    return given


def _number(whole: str, parameter: str, value: str, kind: type) -> float:
    try:
        number = float(kind(value))
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise CoterieError(f'{parameter} in {whole} must be {expected}, not "{value.strip()}"') from None
    if not (math.isfinite(number) and number > 0):
        raise CoterieError(f"{parameter} in {whole} must be above 0, not {value.strip()}")
    return number
