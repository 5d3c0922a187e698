"""What the operator of a device or an edge allows a cloud to ask: `--allow FILE`, a TOML file.

    methods = ["fedavg", "fedrep"]             # default: Coterie's own
    models = ["mlp", "wards.models:ChestNet"]  # default: Coterie's own, and no code by module path

    [settings]                # those of the run that are not named here must have their defaults
    lr = {max = 0.1}
    batch = [16, 32]

    [settings.fedrep]         # the same for the settings of a method
    head_epochs = {min = 1, max = 10}

    [bounds]
    rounds = 200
    epochs = 10               # local, in a round, all phases together
    bytes_down = "20 MB"      # in a round
    bytes_up = "2 MB"

    [leave]                   # what may leave: kinds of entries, and their names
    kinds = ["model", "scores"]
    entries = ["body.*"]

A plan is held against it before anything that the plan names is imported or built. Bounds are held again in every
round, against what is really asked and really about to leave.
"""

import fnmatch
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from coterie import methods as m
from coterie.config import RunSettings
from coterie.core.method import Method, Phase
from coterie.core.schema import Kind, Schema
from coterie.engine.messages import ScoreRequest, TrainRequest
from coterie.engine.session import Session
from coterie.errors import CoterieError, unknown
from coterie.federation.payload_kinds import BytesByKind
from coterie.federation.protocol.messages import Request
from coterie.models.per_client import is_assignment, parse_client_models
from coterie.models.registry import ENTRY_POINT_GROUP, WITH_NORM
from coterie.models.zoo import ZOO

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:([A-Za-z_][A-Za-z0-9_.]*|\*)")
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(kB|MB|GB)")
UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
LONGEST = 200  # characters or items of an option of the model
KINDS = (*get_args(Kind), "scores")  # scores: counts of right predictions and the like, per class
# settings of a run that decide what a device computes or tells; the others are the cloud's own affair
GOVERNED = (
    "batch", "lr", "lr_decay", "optimizer", "momentum", "weight_decay", "opt_state", "bn_stats", "eval_every", "watch",
    "final_trained", "headline",
)  # fmt: skip
NEVER = ("warm_start", "official", "log_updates")  # read files here, or send models that no method sends
T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """The values that a setting may have."""

    values: tuple[Any, ...] | None = None
    low: float = -math.inf
    high: float = math.inf

    def holds(self, value: Any) -> bool:
        if self.values is not None:
            return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values)
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        if self.values is not None:
            return " or ".join(map(_word, self.values)) if self.values else "no value at all"
        if math.isinf(self.low) or math.isinf(self.high):
            return f"at most {self.high:g}" if math.isinf(self.low) else f"at least {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


Rules = Mapping[str, Rule]


@dataclass(frozen=True)
class Allow:
    """The operator's word; the default is that of a device without a file."""

    methods: tuple[str, ...] | None = None  # None: Coterie's own
    models: tuple[str, ...] | None = None
    settings: Rules | None = None  # of the run; None: any
    of_method: Mapping[str, Rules] = field(default_factory=dict)  # of methods; others may have any
    rounds: float = math.inf
    epochs: float = math.inf
    bytes_down: float = math.inf  # in a round
    bytes_up: float = math.inf
    kinds: tuple[str, ...] = KINDS
    entries: tuple[str, ...] = ("*",)

    @staticmethod
    def read(path: Path | None) -> "Allow":
        """The file, checked; without one the default."""
        if path is None:
            return Allow()
        try:
            found = tomllib.loads(path.read_text())
        except OSError as e:
            raise CoterieError(f"{path} cannot be read: {e.strerror}") from None
        except (ValueError, RecursionError) as e:
            raise CoterieError(f"{path} is not TOML: {e}") from None
        try:
            return Allow.of(found)
        except CoterieError as e:
            raise CoterieError(f"{path}: {e}") from None

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Allow":
        _known("key", given, ("methods", "models", "settings", "bounds", "leave"))
        made: dict[str, Any] = {}
        if "methods" in given:
            made["methods"] = tuple(_method(name) for name in _words("methods", given["methods"]))
        if "models" in given:
            made["models"] = tuple(_model(name) for name in _words("models", given["models"]))
        if "settings" in given:
            made["settings"], made["of_method"] = _settings(_table("settings", given["settings"]))
        bounds, leave = _table("bounds", given.get("bounds", {})), _table("leave", given.get("leave", {}))
        _known("bound", bounds, BOUNDS)
        made |= {name: BOUNDS[name](name, value) for name, value in bounds.items()}
        _known("key of [leave]", leave, ("kinds", "entries"))
        if "kinds" in leave:
            made["kinds"] = _words("kinds", leave["kinds"])
            _known("kind", made["kinds"], KINDS)
        if "entries" in leave:
            made["entries"] = _words("entries", leave["entries"])
        return Allow(**made)

    # ---- a plan ------------------------------------------------------------------------------------------------------
    def check_plan(self, s: RunSettings) -> None:
        """Refuse settings beyond what is allowed, before anything that they name is imported or built."""
        self._check_method(s.method)
        if s.model is not None:
            for name in [n for _, n in parse_client_models(s.model)] if is_assignment(s.model) else [s.model]:
                self._check_model(name)
        for name, value in s.model_options.items():
            values = value if isinstance(value, list) else [value]
            if not name.isidentifier() or len(values) > LONGEST or not all(map(_plain, values)):
                raise CoterieError(f"the plan's model option {name[:80]!r} is no plain value")
        for name in NEVER:
            if getattr(s, name):
                raise CoterieError(f"the plan sets {name}, which no host of a federation allows")
        if self.settings is not None:
            _check_rules(self.settings, {n: getattr(s, n) for n in GOVERNED}, {n: _default(n) for n in GOVERNED})
        if (rules := self.of_method.get(m.canonical(s.method))) is not None:
            reading = {k: v for k, v in s.settings.items() if k == "reading"}
            chosen, usual = (m.written_out(s.method, m.build(s.method, own)) for own in (s.settings, reading))
            if "reading" in usual:
                usual["reading"] = m.fields(s.method)["reading"].default
            _check_rules(rules, chosen, usual)
        if s.rounds > self.rounds:
            raise CoterieError(f"the plan asks for {s.rounds} rounds, this host allows {self.rounds:g}")
        if s.epochs > self.epochs:
            raise CoterieError(f"the plan asks for {s.epochs:g} epochs in a round, this host allows {self.epochs:g}")
        if "scores" not in self.kinds and s.watch:
            raise CoterieError('this host does not let "scores" leave, so the plan must set watch = false')

    def _check_method(self, name: str) -> None:
        if not WORD.fullmatch(name):
            raise CoterieError(f"the plan's method {name[:80]!r} is not the name of an installed method")
        key = m.canonical(name)
        if key not in m.known():
            raise unknown("method", name, m.known())
        if self.methods is None and _theirs(m.GROUP, key):
            raise CoterieError(f'the method "{key}" is not one of Coterie\'s own, and this host does not allow it')
        if self.methods is not None and key not in self.methods:
            raise CoterieError(f'this host does not allow the method "{key}"')

    def _check_model(self, name: str) -> None:
        if WORD.fullmatch(name):
            if self.models is None and name not in ZOO and _theirs(ENTRY_POINT_GROUP, name):
                raise CoterieError(f'the model "{name}" is not one of Coterie\'s own, and this host does not allow it')
            if self.models is not None and name not in self.models and name != WITH_NORM:
                raise CoterieError(f'this host does not allow the model "{name}"')
            return
        if not PATH.fullmatch(name) or name.endswith("*"):
            raise CoterieError(f"the plan's model {name[:80]!r} is neither a name nor package.module:name")
        if not {name, f"{name.partition(':')[0]}:*"} & set(self.models or ()):
            raise CoterieError(f'the plan names the code "{name}" as its model, which this host does not allow')

    def check_session(self, session: Session, samples: int | None) -> None:
        """Refuse what is known only once method and model are built: the model that nobody named, what is sent.

        `samples` are those of training here; an edge has none.
        """
        if session.settings.model in (None, WITH_NORM):
            self._check_model(str(session.model_of(0)))
        method = session.method
        up, down = method.schema("up"), method.schema("down")
        for name, entry in up.entries.items():
            if not entry.optional and not up.may_be_empty:
                self._check_leaves(name, entry.kind)
        for words, least, most in (
            ("sends at least", _least(up), self.bytes_up), ("receives at least", _least(down), self.bytes_down),
        ):  # fmt: skip
            if least > most:
                raise CoterieError(f"a round of this method {words} {least} bytes, this host allows {most:.0f}")
        self._check_epochs(method, method.phases(1), samples, 1)

    # ---- a round -----------------------------------------------------------------------------------------------------
    def check_request(self, method: Method, request: Request, samples: int) -> None:
        """Refuse a job before any work is done for it."""
        last = self.rounds + isinstance(request, ScoreRequest)  # the models of the last round are scored after it
        if request.round > last:
            raise CoterieError(f"round {request.round} is beyond the {self.rounds:g} rounds that this host allows")
        if isinstance(request, TrainRequest) or "trained" in request.more:
            self._check_epochs(method, method.phases(request.round), samples, request.round)
        if isinstance(request, ScoreRequest):
            self._check_epochs(method, method.adapt(), samples, request.round)

    def _check_epochs(self, method: Method, phases: Iterable[Phase], samples: int | None, round: int) -> None:
        total = epochs_of(method, phases, samples)
        if total > self.epochs + 1e-9:
            raise CoterieError(f"round {round} would train for {total:g} epochs, this host allows {self.epochs:g}")

    def check_leaving(self, up: Schema, upload: Iterable[str], sizes: BytesByKind) -> None:
        """Refuse an answer that holds what may not leave."""
        for name in upload:
            entry = up.entries.get(name)
            self._check_leaves(name, "unknown" if entry is None else entry.kind)
        if "scores" in sizes and "scores" not in self.kinds:
            raise CoterieError('this host does not let "scores" leave')

    def _check_leaves(self, name: str, kind: str) -> None:
        if kind not in self.kinds:
            raise CoterieError(f'this host does not let "{kind}" leave, which the method sends ({name})')
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.entries):
            raise CoterieError(f'this host does not let the entry "{name}" leave, which the method sends')


class Spent:
    """Bytes of the rounds of one run, in and out, repeated questions included."""

    def __init__(self, allow: Allow):
        self.allow = allow
        self._run, self._bytes = "", dict[tuple[str, int], int]()

    def count(self, way: str, run: str, round: int, size: int) -> None:
        """Raises before the bound is passed; what was refused is not counted."""
        if run != self._run:
            self._run, self._bytes = run, {}
        most = self.allow.bytes_up if way == "up" else self.allow.bytes_down
        total = self._bytes.get((way, round), 0) + size
        if total > most:
            word = "send" if way == "up" else "receive"
            raise CoterieError(f"round {round} would {word} {total} bytes, this host allows {most:.0f} in a round")
        self._bytes[way, round] = total


def epochs_of(method: Method, phases: Iterable[Phase], samples: int | None) -> float:
    """Of all phases together; steps count as the part of an epoch that they are, if there are samples."""
    batches = math.inf if samples is None else max(1, math.ceil(samples / method.ctx.batch))
    found = 0.0
    for p in phases:
        if p.steps is not None:
            found += p.steps * p.batches_per_step / batches
        else:
            found += method.ctx.epochs if p.epochs is None else p.epochs
    return found


# ---- reading -------------------------------------------------------------------------------------------------------
def _known(what: str, given: Iterable[str], names: Iterable[str]) -> None:
    choices = list(names)
    for name in given:
        if name not in choices:
            raise unknown(what, str(name), choices)


def _table(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise CoterieError(f"{name} = {given!r} is invalid: it must be a table, [{name}]")
    return given


def _words(name: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(w, str) and w for w in given):
        raise CoterieError(f'{name} = {given!r} is invalid: it must be a list of names, such as ["a", "b"]')
    return tuple(given)


def _method(name: str) -> str:
    key = m.canonical(name)
    if key not in m.known():
        raise unknown("method", name, m.known())
    return key


def _model(name: str) -> str:
    if PATH.fullmatch(name):
        return name
    if ":" in name:
        raise CoterieError(f'model "{name}" must be a name, package.module:name or package.module:*')
    names = [*ZOO, *_origins(ENTRY_POINT_GROUP)]
    if name not in names:
        raise unknown("model", name, names)
    return name


def _settings(given: Mapping[str, Any]) -> tuple[Rules, dict[str, Rules]]:
    """Rules of the run's settings, and of those of methods."""
    of_run: dict[str, Rule] = {}
    of_method: dict[str, Rules] = {}
    for name, value in given.items():
        if name in GOVERNED:
            of_run[name] = _rule(name, value, RunSettings.model_fields[name])
        elif m.canonical(name) in m.known():
            fields = m.fields(name)
            table = _table(f"settings.{name}", value)
            _known(f"setting of {name}", table, fields)
            of_method[m.canonical(name)] = {k: _rule(k, v, fields[k]) for k, v in table.items()}
        else:
            raise unknown("setting", name, [*GOVERNED, *m.known()])
    return of_run, of_method


def _rule(name: str, given: Any, about: FieldInfo) -> Rule:
    kind: TypeAdapter[Any] = TypeAdapter(Annotated[about.annotation, about])  # type: ignore[arg-type]  # known at run time

    def checked(value: Any) -> Any:
        try:
            return kind.validate_python(value, strict=True)
        except ValidationError as e:
            reason = m.sentence(name, e).partition("is invalid: ")[2]
            raise CoterieError(f"{name} = {value!r} is invalid: {reason}") from None

    if isinstance(given, dict) and given and set(given) <= {"min", "max"}:
        low, high = given.get("min", -math.inf), given.get("max", math.inf)
        numbers = all(type(v) in (int, float) for v in given.values())
        if not numbers or not {int, float} & {about.annotation, *get_args(about.annotation)} or low > high:
            raise CoterieError(f"{name} = {given!r} is invalid: min and max are numbers, of a setting that is a number")
        return Rule(None, low, high)
    if isinstance(given, dict):
        raise CoterieError(
            f"{name} = {given!r} is invalid: it must be a value, a list of values or {{min = 1, max = 2}}"
        )
    return Rule(tuple(checked(v) for v in given) if isinstance(given, list) else (checked(given),))


def _whole(name: str, given: Any) -> float:
    if type(given) is not int or given < 1:
        raise CoterieError(f"{name} = {given!r} is invalid: it must be a whole number, at least 1")
    return given


def _number(name: str, given: Any) -> float:
    if type(given) not in (int, float) or not 0 < given < math.inf:
        raise CoterieError(f"{name} = {given!r} is invalid: it must be a number above 0")
    return float(given)


def _size(name: str, given: Any) -> float:
    if type(given) is int and given > 0:
        return given
    match = SIZE.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise CoterieError(f'{name} = {given!r} is invalid: it must be bytes, such as 500000, "500 kB" or "2 MB"')
    return round(float(match[1]) * UNITS[match[2]])


BOUNDS: dict[str, Callable[[str, Any], float]] = {
    "rounds": _whole, "epochs": _number, "bytes_down": _size, "bytes_up": _size,
}  # fmt: skip


# ---- checking ------------------------------------------------------------------------------------------------------
def _check_rules(rules: Rules, chosen: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    for name, value in chosen.items():
        if name not in rules and value != usual[name]:
            default = _word(usual[name])
            raise CoterieError(
                f"the plan sets {name} = {_word(value)}, which this host allows only at its default, {default}"
            )
        if name in rules and not rules[name].holds(value):
            raise CoterieError(f"the plan sets {name} = {_word(value)}, this host allows {rules[name]}")


def _least(schema: Schema) -> int:
    """Bytes of the smallest payload."""
    if schema.may_be_empty:
        return 0
    least = {word: low for word, (low, _) in schema.lengths.items()}
    return sum(e.size(least) for e in schema.entries.values() if not e.optional)


def _default(name: str) -> Any:
    return RunSettings.model_fields[name].default


@cache
def _origins(group: str) -> dict[str, str]:
    """Where the code of installed names lies."""
    return {p.name: p.value for p in entry_points(group=group)}


def _theirs(group: str, name: str) -> bool:
    return name in _origins(group) and not _origins(group)[name].startswith("coterie.")


def _word(value: Any) -> str:
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float) or (type(value) is str and len(value) <= LONGEST)
