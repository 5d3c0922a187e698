"""The settings of a run: one typed class, from Python, TOML or the command line."""

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.data.settings import PartitionSettings
from coterie.errors import CoterieError, unknown
from coterie.methods import find, sentence


class RunSettings(BaseModel):
    """Everything that decides the numbers of a run. How it is computed (workers, disk) is elsewhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    settings: dict[str, Any] = Field({}, description="the method's own settings")
    data: str = Field("digits", description="a known name, a file or folder, hub:owner/name or module:function")
    subset: int | None = Field(None, ge=1, description="use only so many samples")
    federation: PartitionSettings = Field(PartitionSettings(), description="who has what")
    model: str | None = Field(None, description="a known name or package.module:factory; empty: what fits the data")
    model_options: dict[str, Any] = {}
    rounds: int = Field(50, ge=1)
    join: float = Field(0.5, gt=0, le=1, description="share of the clients that take part in a round")
    epochs: float = Field(5, gt=0, description="local epochs")
    batch: int = Field(32, ge=1)
    lr: float = Field(0.05, gt=0)
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on lr from round to round")
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    opt_state: Literal["reset", "keep"] = Field("reset", description="does momentum or Adam's memory outlive a round")
    weighting: Literal["samples", "uniform"] | None = Field(None, description="empty: as the method's paper says")
    bn_stats: Literal["shared", "local"] = Field("shared", description="do batch-norm statistics travel")
    seed: int = Field(0, ge=0)
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


class Engine(BaseModel):
    """How a run is computed; changes nothing in its results."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int | None = Field(None, ge=1, description="processes; empty: the cores")
    runtime: Literal["local", "ray"] = Field("local", description="processes of this machine, or of a Ray cluster")
    address: str | None = Field(None, description="of the Ray cluster; empty: one is started on this machine")
    engine: Literal["loop", "stack", "auto"] = Field(
        "loop", description="clients one after the other, many at once, or whichever is faster (equal to rounding)"
    )
    state: Literal["memory", "disk"] = Field("memory", description="where client state is kept between rounds")
    data_dir: Path | None = None


def settings(**given: Any) -> RunSettings:
    """Checked settings; names may belong to the run, to the federation or to the method, and are sorted out here."""
    method = given.get("method")
    own = dict(given.pop("settings", {}) or {})
    fed = given.pop("federation", {})
    fed = fed.model_dump(exclude_unset=True) if isinstance(fed, PartitionSettings) else dict(fed or {})
    fields = find(method).Settings.model_fields if isinstance(method, str) else {}
    run: dict[str, Any] = {}
    for name, value in given.items():
        if name in RunSettings.model_fields:
            run[name] = value
        elif name in PartitionSettings.model_fields:
            fed[name] = value
        elif name in fields:
            own[name] = value
        else:
            raise unknown("setting", name, [*RunSettings.model_fields, *PartitionSettings.model_fields, *fields])
    try:
        return RunSettings(**run, settings=own, federation=PartitionSettings(**fed))
    except ValidationError as e:
        raise CoterieError(sentence("settings", e)) from None


def from_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file, flat: tables `settings` and `federation` stay tables."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as e:
        raise CoterieError(f"{path} cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise CoterieError(f"{path} is not TOML: {e}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """'mu=0.1' to ("mu", 0.1); a value that is not TOML is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise CoterieError(f'"{text}" is not key=value')
    try:
        return name.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()
