"""The policy of a device or an edge: what its operator allows a cloud to ask for. Read from `--allow FILE`, in TOML.

    methods = ["fedavg", "fedrep"]             # default: all methods of Coterie
    models = ["mlp", "wards.models:ChestNet"]  # default: all models of Coterie, and no code by module path
    code = ["wards.training:*"]                # functions that settings may name by module path; default: none

    [settings]                # a setting of the run that is not listed must have its default value
    lr = {max = 0.1}
    batch = [16, 32]

    [settings.fedrep]         # the same for the settings of a method
    head_epochs = {min = 1, max = 10}

    [bounds]
    rounds = 200              # default: 100,000
    epochs = 10               # local epochs in a round, all phases together; default: 1,000
    parameters = 1_000_000    # numbers in a model; default: 100,000,000
    bytes_down = "20 MB"      # in a round
    bytes_up = "2 MB"

    [reveal]                  # what could reveal single items (reveal.py); reveal = "anything" switches this off
    batch = 8                 # smallest batch
    items = 16                # fewest training items behind an upload
    lr = 1.0                  # largest learning rate
    weight_decay = 0.1        # largest weight decay
    first_model = "agreed"    # the first download must be what the plan's seed gives; or "any"

    [leave]                   # payload entries that may leave the host, by kind and by name
    kinds = ["model", "scores"]  # columns: counts, sums and categories of a table's columns, as entries column.NAME
    entries = ["body.*"]

A plan is checked before anything that it names is imported or built. Bounds are checked again in every round, against
the actual request and the actual answer.
"""

import fnmatch
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from coterie import methods as m
from coterie.config import RunSettings
from coterie.core.method import Method, Phase
from coterie.core.metrics import check_counts_suffice
from coterie.core.schema import Kind, Schema
from coterie.engine.messages import ScoreRequest, SendRequest, TrainRequest
from coterie.engine.session import Session
from coterie.errors import CoterieError, unknown
from coterie.federation.payload_kinds import BytesByKind
from coterie.federation.policy.reveal import Reveal
from coterie.federation.protocol.messages import Request, SumRequest
from coterie.models.per_client import is_assignment, parse_client_models
from coterie.models.registry import ENTRY_POINT_GROUP, WITH_NORM, count_parameters
from coterie.models.zoo import ZOO
from coterie.storage.atomic import write_atomic

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_CODE_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:([A-Za-z_][A-Za-z0-9_.]*|\*)")
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(kB|MB|GB)")
_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
_MAX_OPTION = 200  # characters or items of an option of the model
# scores: counts of predictions per class, such as correct ones; columns: statistics of a table's columns (TableAnswer)
ALLOWED_KINDS = (*get_args(Kind), "scores", "columns")
# settings of a run that decide what a device computes or sends; the others concern only the cloud
GOVERNED_SETTINGS = (
    "batch", "lr", "lr_decay", "lr_rounds", "lr_steps", "local_steps", "augment", "optimizer", "loss", "class_weights",
    "grad_clip", "momentum",
    "weight_decay", "opt_state", "bn_stats", "eval_every", "metrics", "watch", "final_trained", "headline", "use",
    "freeze", "frozen_features", "lora_rank", "lora_alpha", "lora_targets",
    "dp", "secure",
)  # fmt: skip
CODE_SETTINGS = ("optimizer", "loss")  # settings that may name a function by module path
# settings that read local files, send undeclared models, or ask for lies
_FORBIDDEN_SETTINGS = ("warm_start", "weights", "official", "log_updates", "attack")


@dataclass(frozen=True)
class SettingRule:
    """The values that a setting may have: a list, or a range."""

    values: tuple[Any, ...] | None = None
    low: float = -math.inf
    high: float = math.inf

    def allows(self, value: Any) -> bool:
        """True if the setting may have this value; True and 1 are different values."""
        if self.values is not None:
            return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values)
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        if self.values is not None:
            return " or ".join(map(_shown, self.values)) if self.values else "no value at all"
        if math.isinf(self.low) or math.isinf(self.high):
            return f"at most {self.high:g}" if math.isinf(self.low) else f"at least {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


SettingRules = Mapping[str, SettingRule]


@dataclass(frozen=True)
class Allow:
    """The policy of a host; the defaults are those of a host without a policy file."""

    methods: tuple[str, ...] | None = None  # None: all methods of Coterie
    models: tuple[str, ...] | None = None  # None: all models of Coterie
    code: tuple[str, ...] = ()  # functions by module path that settings may name
    settings: SettingRules | None = None  # rules for the run's settings; None: any value
    method_settings: Mapping[str, SettingRules] = field(default_factory=dict)  # by method; any value for others
    rounds: float = 100_000
    epochs: float = 1_000
    parameters: float = 100_000_000  # numbers in one of Coterie's models; code by module path is not counted
    bytes_down: float = math.inf  # bytes received in a round
    bytes_up: float = math.inf  # bytes sent in a round
    kinds: tuple[str, ...] = ALLOWED_KINDS
    entries: tuple[str, ...] = ("*",)
    reveal: Reveal = Reveal()  # noqa: RUF009  # immutable

    @staticmethod
    def read(path: Path | None) -> "Allow":
        """Return the policy in a TOML file, or the default policy without a file."""
        if path is None:
            return Allow()
        try:
            tables = tomllib.loads(path.read_text())
        except OSError as e:
            raise CoterieError(f"{path} cannot be read: {e.strerror}") from None
        except (ValueError, RecursionError) as e:
            raise CoterieError(f"{path} is not TOML: {e}") from None
        try:
            return Allow.of(tables)
        except CoterieError as e:
            raise CoterieError(f"{path}: {e}") from None

    @staticmethod
    def of(tables: Mapping[str, Any]) -> "Allow":
        """Return the policy in the tables of a file; raise CoterieError about the first mistake."""
        _check_known("key", tables, ("methods", "models", "code", "settings", "bounds", "reveal", "leave"))
        policy: dict[str, Any] = {}
        if "methods" in tables:
            policy["methods"] = tuple(map(_method, _names("methods", tables["methods"])))
        if "models" in tables:
            policy["models"] = tuple(map(_model, _names("models", tables["models"])))
        if "code" in tables:
            policy["code"] = tuple(map(_code, _names("code", tables["code"])))
        if "settings" in tables:
            policy["settings"], policy["method_settings"] = _settings(_table("settings", tables["settings"]))
        if "reveal" in tables:
            policy["reveal"] = Reveal.of(tables["reveal"])
        bounds, leave = _table("bounds", tables.get("bounds", {})), _table("leave", tables.get("leave", {}))
        _check_known("bound", bounds, _BOUNDS)
        policy |= {name: _BOUNDS[name](name, value) for name, value in bounds.items()}
        _check_known("key of [leave]", leave, ("kinds", "entries"))
        policy |= {name: _names(name, value) for name, value in leave.items()}
        _check_known("kind", policy.get("kinds", ()), ALLOWED_KINDS)
        return Allow(**policy)

    # ---- a plan ------------------------------------------------------------------------------------------------------
    def check_plan(self, settings: RunSettings) -> None:
        """Raise CoterieError if a plan asks for more than is allowed; nothing that it names is imported or built."""
        self._check_method(settings.method)
        if (model := settings.model) is not None:
            for name in [n for _, n in parse_client_models(model)] if is_assignment(model) else [model]:
                self._check_model(name)
        for name, value in settings.model_options.items():
            values = value if isinstance(value, list) else [value]
            if not name.isidentifier() or len(values) > _MAX_OPTION or not all(map(_is_plain, values)):
                raise CoterieError(f"the plan's model option {name[:80]!r} is not a plain value")
        for name in _FORBIDDEN_SETTINGS:
            if getattr(settings, name):
                raise CoterieError(f"the plan sets {name}, which no host of a federation allows")
        check_counts_suffice(settings.metrics)
        for name in CODE_SETTINGS:
            if isinstance(path := getattr(settings, name), str) and ":" in path:
                self._check_code(name, path)
        if self.settings is not None:
            defaults = {name: RunSettings.model_fields[name].default for name in GOVERNED_SETTINGS}
            _check_rules(self.settings, {name: getattr(settings, name) for name in GOVERNED_SETTINGS}, defaults)
        self.reveal.check_plan(settings, self.settings or ())
        if (rules := self.method_settings.get(m.registered_name(settings.method))) is not None:
            _check_rules(rules, *_chosen_and_default(settings.method, settings.settings))
        if settings.rounds > self.rounds:
            raise CoterieError(f"the plan asks for {settings.rounds} rounds, this host allows {self.rounds:g}")
        if settings.epochs > self.epochs:
            raise CoterieError(
                f"the plan asks for {settings.epochs:g} epochs in a round, this host allows {self.epochs:g}"
            )
        if "scores" not in self.kinds and settings.watch:
            raise CoterieError('this host does not let "scores" leave, so the plan must set watch = false')

    def check_model_size(
        self, settings: RunSettings, shape: tuple[int, ...], outputs: int, vocab: int | None, default: str
    ) -> None:
        """Raise CoterieError if a model of Coterie would be too large; no memory is taken for it."""
        chosen = default if settings.model in (None, WITH_NORM) else str(settings.model)
        for name in [n for _, n in parse_client_models(chosen)] if is_assignment(chosen) else [chosen]:
            if name in ZOO:
                size = count_parameters(name, shape, outputs, vocab, settings.model_options)
                if size > self.parameters:
                    raise CoterieError(
                        f"the plan's model {name} has {size} parameters, this host allows {self.parameters:.0f}"
                    )

    def _check_method(self, name: str) -> None:
        if not _PLAIN_NAME.fullmatch(name):
            raise CoterieError(f"the plan's method {name[:80]!r} is not the name of an installed method")
        key = m.registered_name(name)
        if key not in m.method_names():
            raise unknown("method", name, m.method_names())
        if self.methods is None and _is_foreign(m.METHOD_GROUP, key):
            raise CoterieError(f'the method "{key}" is not one of Coterie\'s own, and this host does not allow it')
        if self.methods is not None and key not in self.methods:
            raise CoterieError(f'this host does not allow the method "{key}"')

    def _check_model(self, name: str) -> None:
        if _PLAIN_NAME.fullmatch(name):
            if self.models is None and name not in ZOO and _is_foreign(ENTRY_POINT_GROUP, name):
                raise CoterieError(f'the model "{name}" is not one of Coterie\'s own, and this host does not allow it')
            if self.models is not None and name not in self.models and name != WITH_NORM:
                raise CoterieError(f'this host does not allow the model "{name}"')
            return
        if not _CODE_PATH.fullmatch(name) or name.endswith("*"):
            raise CoterieError(f"the plan's model {name[:80]!r} is neither a name nor package.module:name")
        if not {name, f"{name.partition(':')[0]}:*"} & set(self.models or ()):
            raise CoterieError(f'the plan names the code "{name}" as its model, which this host does not allow')

    def _check_code(self, setting: str, path: str) -> None:
        if not _CODE_PATH.fullmatch(path) or path.endswith("*"):
            raise CoterieError(f"the plan's {setting} {path[:80]!r} is not of the form package.module:name")
        if not {path, f"{path.partition(':')[0]}:*"} & set(self.code):
            raise CoterieError(f'the plan names the code "{path}" as its {setting}, which this host does not allow')

    def check_session(self, session: Session, samples: int | None) -> None:
        """Check what is known only once method and model are built: a default model, payloads, epochs.

        `samples` is the number of training samples of this host; None for an edge.
        """
        if session.settings.model in (None, WITH_NORM):
            self._check_model(str(session.model_of(0)))
        method = session.method
        up, down = method.schema("up"), method.schema("down")
        for name, entry in up.entries.items():
            if not entry.optional and not up.may_be_empty:
                self._check_entry(name, entry.kinds)
        for verb, schema, allowed in (("sends", up, self.bytes_up), ("receives", down, self.bytes_down)):
            if (size := _smallest_bytes(schema)) > allowed:
                raise CoterieError(
                    f"a round of this method {verb} at least {size} bytes, this host allows {allowed:.0f}"
                )
        self._check_epochs(method, method.phases(1), samples, 1)
        self.reveal.check_items(method, method.phases(1), samples)

    # ---- a round -----------------------------------------------------------------------------------------------------
    def check_request(self, method: Method, request: Request, samples: int) -> None:
        """Raise CoterieError if a request is not allowed, before any work is done for it."""
        last = self.rounds + isinstance(request, ScoreRequest)  # the models of the last round are scored after it
        if request.round > last:
            raise CoterieError(f"round {request.round} is beyond the {self.rounds:g} rounds that this host allows")
        if isinstance(request, SendRequest | SumRequest):
            return
        if isinstance(request, TrainRequest):
            self.reveal.check_items(method, method.phases(request.round), samples, request.share)
        if isinstance(request, TrainRequest) or "trained" in request.more:
            self._check_epochs(method, method.phases(request.round), samples, request.round)
        if isinstance(request, ScoreRequest):
            self._check_epochs(method, method.adapt(), samples, request.round)

    def _check_epochs(self, method: Method, phases: Iterable[Phase], samples: int | None, round: int) -> None:
        total = count_epochs(method, phases, samples)
        if total > self.epochs + 1e-9:
            raise CoterieError(f"round {round} would train for {total:g} epochs, this host allows {self.epochs:g}")

    def check_leaving(self, up: Schema, upload: Iterable[str], sizes: BytesByKind) -> None:
        """Raise CoterieError if an answer contains entries or scores that may not leave."""
        for name in upload:
            entry = up.entries.get(name)
            self._check_entry(name, ("unknown",) if entry is None else entry.kinds)
        if "scores" in sizes and "scores" not in self.kinds:
            raise CoterieError('this host does not let "scores" leave')

    def check_statistics(self, columns: Iterable[str]) -> None:
        """Raise CoterieError if the statistics of these columns of a table may not leave."""
        for name in columns:
            self._check_entry(f"column.{name}", ("columns",), "a federation of tables")

    def _check_entry(self, name: str, kinds: Iterable[str], sender: str = "the method") -> None:
        for kind in kinds:
            if kind not in self.kinds:
                raise CoterieError(f'this host does not let "{kind}" leave, which {sender} sends ({name})')
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.entries):
            raise CoterieError(f'this host does not let the entry "{name}" leave, which {sender} sends')


class ByteBudget:
    """Counts the bytes of each round of a run, repeated requests included, and keeps them within the policy.

    The file has the sums of a run with bounds, so that a process that was started again continues with them.
    """

    def __init__(self, allow: Allow, path: Path):
        self.allow, self.path = allow, path
        self._run, self._bytes = "", dict[str, int]()
        try:
            if path.is_file():
                content = json.loads(path.read_text())
                self._run, self._bytes = str(content["run"]), {str(k): int(n) for k, n in content["bytes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise CoterieError(f"{path} is damaged ({e}); remove it") from None

    def count(self, way: str, run: str, round: int, size: int) -> None:
        """Add `size` bytes; raise CoterieError, and add nothing, if that would exceed the bound."""
        if run != self._run:
            self._run, self._bytes = run, {}
        allowed = self.allow.bytes_up if way == "up" else self.allow.bytes_down
        total = self._bytes.get(f"{way} {round}", 0) + size
        if total > allowed:
            verb = "send" if way == "up" else "receive"
            raise CoterieError(f"round {round} would {verb} {total} bytes, this host allows {allowed:.0f} in a round")
        self._bytes[f"{way} {round}"] = total
        if allowed < math.inf:
            write_atomic(self.path, json.dumps({"run": run, "bytes": self._bytes}).encode())


def count_epochs(method: Method, phases: Iterable[Phase], samples: int | None) -> float:
    """Return the epochs of all phases together; steps count as a fraction of an epoch, or 0 without samples."""
    batches = math.inf if samples is None else max(1, math.ceil(samples / method.ctx.batch))
    total = 0.0
    for phase in phases:
        steps = method.ctx.local_steps if phase.steps is None and phase.epochs is None else phase.steps
        if steps is not None:
            total += steps * phase.batches_per_step / batches
        else:
            total += method.ctx.epochs if phase.epochs is None else phase.epochs
    return total


# ---- reading a file ------------------------------------------------------------------------------------------------
def _check_known(what: str, names: Iterable[str], choices: Iterable[str]) -> None:
    for name in names:
        if name not in choices:
            raise unknown(what, str(name), list(choices))


def _invalid(name: str, value: Any, reason: str) -> CoterieError:
    return CoterieError(f"{name} = {value!r} is invalid: {reason}")


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(name, value, f"it must be a table, [{name}]")
    return value


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(w, str) and w for w in value):
        raise _invalid(name, value, 'it must be a list of names, such as ["a", "b"]')
    return tuple(value)


def _method(name: str) -> str:
    key = m.registered_name(name)
    _check_known("method", [key], m.method_names())
    return key


def _model(name: str) -> str:
    if not _CODE_PATH.fullmatch(name):
        if ":" in name:
            raise CoterieError(f'model "{name}" must be a name, package.module:name or package.module:*')
        _check_known("model", [name], [*ZOO, *_code_of_names(ENTRY_POINT_GROUP)])
    return name


def _settings(table: Mapping[str, Any]) -> tuple[SettingRules, dict[str, SettingRules]]:
    """Return the rules for the run's settings, and those for the settings of methods."""
    run_rules: dict[str, SettingRule] = {}
    method_rules: dict[str, SettingRules] = {}
    for name, value in table.items():
        if name in GOVERNED_SETTINGS:
            run_rules[name] = _rule(name, value, RunSettings.model_fields[name])
        elif m.registered_name(name) in m.method_names():
            fields, rules = m.fields(name), _table(f"settings.{name}", value)
            _check_known(f"setting of {name}", rules, fields)
            method_rules[m.registered_name(name)] = {k: _rule(k, v, fields[k]) for k, v in rules.items()}
        else:
            raise unknown("setting", name, [*GOVERNED_SETTINGS, *m.method_names()])
    return run_rules, method_rules


def _rule(name: str, value: Any, about: FieldInfo) -> SettingRule:
    """Return the rule that a value, a list of values or a table of min and max stands for."""
    if isinstance(value, dict):
        if not value or not set(value) <= {"min", "max"}:
            raise _invalid(name, value, "it must be a value, a list of values or {min = 1, max = 2}")
        low, high = value.get("min", -math.inf), value.get("max", math.inf)
        are_numbers = all(type(v) in (int, float) for v in value.values())
        if not are_numbers or not {int, float} & {about.annotation, *get_args(about.annotation)} or low > high:
            raise _invalid(name, value, "min and max are numbers, of a setting that is a number")
        return SettingRule(None, low, high)
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[about.annotation, about])  # type: ignore[arg-type]  # known at run time

    def validated(item: Any) -> Any:
        try:
            return adapter.validate_python(item, strict=True)
        except ValidationError as e:
            raise _invalid(name, item, m.validation_sentence(name, e).partition("is invalid: ")[2]) from None

    return SettingRule(tuple(map(validated, value if isinstance(value, list) else [value])))


def _code(name: str) -> str:
    if not _CODE_PATH.fullmatch(name):
        raise CoterieError(f"code = {name!r} is invalid: it must be package.module:name or package.module:*")
    return name


def _positive_int(name: str, value: Any) -> float:
    if type(value) is not int or value < 1:
        raise _invalid(name, value, "it must be a whole number, at least 1")
    return value


def _positive_number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _invalid(name, value, "it must be a number above 0")
    return float(value)


def _byte_count(name: str, value: Any) -> float:
    if type(value) is int and value > 0:
        return value
    match = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _invalid(name, value, 'it must be bytes, such as 500000, "500 kB" or "2 MB"')
    return round(float(match[1]) * _UNITS[match[2]])


_BOUNDS: dict[str, Callable[[str, Any], float]] = {
    "rounds": _positive_int,
    "epochs": _positive_number,
    "parameters": _positive_int,
    "bytes_down": _byte_count,
    "bytes_up": _byte_count,
}


# ---- checking ------------------------------------------------------------------------------------------------------
def _check_rules(rules: SettingRules, chosen: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for name, value in chosen.items():
        setting = f"the plan sets {name} = {_shown(value)}"
        if name not in rules and value != defaults[name]:
            raise CoterieError(f"{setting}, which this host allows only at its default, {_shown(defaults[name])}")
        if name in rules and not rules[name].allows(value):
            raise CoterieError(f"{setting}, this host allows {rules[name]}")


def _chosen_and_default(method: str, chosen: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a method in a plan, and the defaults of the chosen reading of its paper."""
    reading = {name: value for name, value in chosen.items() if name == "reading"}
    settings, defaults = (m.build_method(method, own).hp.model_dump(mode="json") for own in (chosen, reading))
    if "reading" in defaults:
        defaults["reading"] = m.fields(method)["reading"].default
    return settings, defaults


def _smallest_bytes(schema: Schema) -> int:
    """Return the bytes of the smallest payload that fits the schema."""
    if schema.may_be_empty:
        return 0
    shortest = {name: low for name, (low, _) in schema.lengths.items()}
    return sum(entry.size(shortest) for entry in schema.entries.values() if not entry.optional)


@cache
def _code_of_names(group: str) -> dict[str, str]:
    """Return the module:name behind each installed name of an entry point group."""
    return {p.name: p.value for p in entry_points(group=group)}


def _is_foreign(group: str, name: str) -> bool:
    """True if a name belongs to an installed package other than Coterie."""
    return name in _code_of_names(group) and not _code_of_names(group)[name].startswith("coterie.")


def _shown(value: Any) -> str:
    """Return a value as a message shows it: as in TOML, and not too long."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float) or (type(value) is str and len(value) <= _MAX_OPTION)
