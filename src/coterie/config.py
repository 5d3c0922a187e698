"""The settings of a run: one typed class, from Python, TOML or the command line."""

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coterie.data.settings import PartitionSettings
from coterie.errors import CoterieError, unknown
from coterie.method import Method
from coterie.methods import build, find, sentence

PUBLIC = 200  # unlabelled items that are set aside for a method that needs some, if nobody says how many
LARGEST = 1e6  # of rates and epochs; anything near it is a slip of the keyboard
BOUND = 1e9  # of numbers whose meaning only a method or a model knows


class RunSettings(BaseModel):
    """Everything that decides the numbers of a run. How it is computed (workers, disk) is elsewhere."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: str
    settings: dict[str, Any] = Field({}, description="the method's own settings")
    data: str = Field("digits", description="a known name, a file or folder, hub:owner/name or module:function")
    subset: int | None = Field(None, ge=1, description="use only so many samples")
    federation: PartitionSettings = Field(PartitionSettings(), description="who has what")
    model: str | None = Field(None, description="a known name or package.module:factory; empty: what fits the data")
    model_options: dict[str, Any] = {}
    rounds: int = Field(50, ge=1, le=10**9)
    join: float = Field(0.5, gt=0, le=1, description="share of the clients that take part in a round")
    epochs: float = Field(5, gt=0, le=LARGEST, description="local epochs")
    batch: int = Field(32, ge=1, le=2**31)
    lr: float = Field(0.05, gt=0, le=LARGEST)
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on lr from round to round")
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, le=LARGEST)
    opt_state: Literal["reset", "keep"] = Field("reset", description="does momentum or Adam's memory outlive a round")
    weighting: Literal["samples", "uniform"] | None = Field(None, description="empty: as the method's paper says")
    bn_stats: Literal["shared", "local"] = Field("shared", description="do batch-norm statistics travel")
    seed: int = Field(0, ge=0, lt=2**63)
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the sampled clients that fail in a round")
    stragglers: float = Field(0.0, ge=0, le=1, description="share of the sampled clients that do fewer epochs")
    newcomers: int = Field(0, ge=0, description="so many last clients never train and are only scored")
    eval_every: int = Field(10, ge=1, description="rounds between evaluations of all clients")
    eval_clients: int | None = Field(None, ge=1, description="score only so many clients, always the same; empty: all")
    watch: bool = Field(True, description="score participants before and after local training in every round")
    final_trained: bool = Field(True, description="after the last round score all clients after local training too")
    official: bool = Field(False, description="score every personal model on the whole official test part too")
    gm_head: Literal["mean", "init"] = Field("mean", description="head of GM, the mean of the personal models")
    checkpoint_every: int = Field(10, ge=1)
    log_updates: bool = Field(False, description="log the norm of the participants' mean update (aun) and the largest")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name not in cls.model_fields:
                raise unknown("setting", str(name), cls.model_fields)
        return given

    @field_validator("model_options", "settings")
    @classmethod
    def _plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if not _is_plain(value):
                raise ValueError(f"{name} must be made of text, lists, tables and numbers within {BOUND:g}")
        return given


class Engine(BaseModel):
    """How a run is computed; changes nothing in its results."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int | None = Field(None, ge=1, description="processes; empty: the cores")
    runtime: Literal["local", "ray", "flower"] = Field(
        "local", description="processes of this machine, of a Ray cluster, or a federation of devices on this machine"
    )
    address: str | None = Field(None, description="of the Ray cluster; empty: one is started on this machine")
    engine: Literal["loop", "stack", "auto"] = Field(
        "loop", description="clients one after the other, many at once, or whichever is faster (equal to rounding)"
    )
    state: Literal["memory", "disk"] = Field("memory", description="where client state is kept between rounds")
    data_dir: Path | None = None


def engine(**given: Any) -> Engine:
    """Checked; what is None is left to its default."""
    try:
        return Engine(**{k: v for k, v in given.items() if v is not None})
    except ValidationError as e:
        raise CoterieError(sentence("options", e)) from None


def settings(method: str | type[Method], **given: Any) -> RunSettings:
    """Checked settings; names may belong to the run, to the federation or to the method, and are sorted out here."""
    cls = method_class(method)
    own, fed = (table(name, given.pop(name, None)) for name in ("settings", "federation"))
    run: dict[str, Any] = {}
    for name, value in given.items():
        {"run": run, "federation": fed, "method": own}[owner(name, cls)][name] = value
    if twice := shared_names(cls):
        raise CoterieError(f'{cls.__name__} calls a setting "{twice[0]}", which runs have already; it must rename it')
    build(cls, own)
    if "public" in cls.needs:
        fed.setdefault("public", PUBLIC)
    try:
        name = method if isinstance(method, str) else method.__name__
        return RunSettings(method=name, settings=own, federation=PartitionSettings(**fed), **run)
    except ValidationError as e:
        raise CoterieError(sentence("settings", e)) from None


def method_class(method: str | type[Method]) -> type[Method]:
    if isinstance(method, str):
        return find(method)
    if isinstance(method, type) and issubclass(method, Method):
        return method
    raise CoterieError(f"method = {method!r} is not possible: it is the name of a method, or a class of yours")


def owner(name: str, *methods: type[Method]) -> Literal["run", "federation", "method"]:
    """Whose setting this is."""
    if name in RunSettings.model_fields:
        return "run"
    if name in PartitionSettings.model_fields:
        return "federation"
    own = [field for m in methods for field in m.Settings.model_fields]
    if name in own:
        return "method"
    raise unknown("setting", name, [*RunSettings.model_fields, *PartitionSettings.model_fields, *own])


def shared_names(method: type[Method]) -> list[str]:
    """Settings of the method whose names a run or federation setting has too."""
    return [
        n for n in method.Settings.model_fields if n in RunSettings.model_fields or n in PartitionSettings.model_fields
    ]


def table(name: str, given: Any) -> dict[str, Any]:
    """The settings of a table; None is an empty one."""
    if isinstance(given, BaseModel):
        return given.model_dump(exclude_unset=True)
    if given is None or isinstance(given, dict):
        return dict(given or {})
    raise CoterieError(f"{name} = {given!r} is not possible: it is a table, such as {name} = {{name = value}}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and abs(value) <= BOUND)


def from_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file, flat: tables `settings` and `federation` stay tables."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as e:
        raise CoterieError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # no TOML, no UTF-8, numbers without end
        raise CoterieError(f"{path} is not TOML: {e}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """'mu=0.1' to ("mu", 0.1); a value that is not TOML is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise CoterieError(f'"{text}" is not key=value')
    try:
        return name.strip(), tomllib.loads(f"v = {value}")["v"]
    except (ValueError, RecursionError):
        return name.strip(), value.strip()
