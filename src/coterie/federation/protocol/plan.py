"""The federation plan: what the cloud announces to all nodes about a run. It is sent as JSON and checked on arrival."""

import hashlib
import json
import math
import re
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from coterie.config import Engine, RunSettings
from coterie.core import tasks
from coterie.core.tree import Tree
from coterie.data.dataset import Dataset
from coterie.data.sources import load_dataset
from coterie.data.table import TableEncoding
from coterie.data.target_types import with_task
from coterie.data.timeline import Change
from coterie.engine.provenance import method_digest
from coterie.engine.session import Session, bind, prepare
from coterie.errors import CoterieError
from coterie.errors import sentence as one_line
from coterie.federation.device_data import DeviceFederation, example_dataset, only_client
from coterie.federation.policy.allow import Allow
from coterie.federation.protocol.version import PROTOCOL, check_protocol
from coterie.methods import build_method, find, validation_sentence
from coterie.models.registry import WITH_NORM, default_for

RUN_ID = re.compile("[0-9a-f]{32}")
_MAX_CHARACTERS = 2**20  # length of a plan
_MAX_LENGTH = 2**20  # classes, targets, or numbers in one dimension of an item
_Length = Annotated[int, Field(ge=1, le=_MAX_LENGTH)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]


class FederationPlan(BaseModel):
    """A run, as devices and edges know it: settings, data and model, and versions to compare."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    protocol: int = PROTOCOL
    coterie: str  # version of the cloud's package, for error messages
    run: str = Field(pattern=f"^{RUN_ID.pattern}$")
    source: str  # digest of the method's code
    code: dict[str, str] = {}  # digests of the code of functions that settings name, by setting
    settings: dict[str, Any]  # RunSettings
    places: int = Field(ge=1, le=10**5)  # number of clients that take part in training
    partition: dict[str, Any] | None  # identity of the partition of named data; None: devices have their own data
    shape: tuple[_Length, ...] = Field(max_length=8)  # shape of one item
    task: str  # name of a task in core/tasks.py
    targets: int = Field(ge=1, le=_MAX_LENGTH)  # numbers per target; 1 for classes
    classes: tuple[str, ...] = Field(max_length=_MAX_LENGTH)
    kind: Literal["float32", "uint8", "int64", "float64"]
    vocab: int | None = Field(ge=1, le=2**24)
    mean: tuple[_Finite, ...] | None = Field(max_length=_MAX_LENGTH)
    std: tuple[_Positive, ...] | None = Field(max_length=_MAX_LENGTH)
    w0: str  # digest of the initial model
    table: TableEncoding | None = None  # common encoding of the devices' tables

    @field_validator("shape")
    @classmethod
    def _check_items(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if math.prod(shape) > 2**24:
            raise ValueError("an item has too many numbers")
        return shape

    def check_moments(self) -> None:
        """Raise ValueError unless there is one mean and deviation, or one per channel."""
        channels = self.shape[0] if self.shape else 1
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, channels):
                raise ValueError(f"{name} has {len(values)} numbers for {channels} channels")

    @staticmethod
    def of(session: Session, run: str) -> "FederationPlan":
        """Return the plan of a cloud's session."""
        data, own = session.federation.dataset, isinstance(session.federation, DeviceFederation)
        return FederationPlan(
            run=run, coterie=version("coterie"), source=method_digest(type(session.method)),
            code=session.code_digests(),
            settings=session.settings.model_dump(mode="json"), places=len(session.federation.clients),
            partition=None if own else session.federation.identity, shape=data.shape,
            task=data.kind, targets=data.targets, classes=data.classes,
            kind=str(data.x.dtype).removeprefix("torch."), vocab=data.vocab, mean=data.mean, std=data.std,
            w0=_tree_digest(session.method.ctx.w0), table=data.table,
        )  # fmt: skip

    @staticmethod
    def read(text: str) -> "FederationPlan":
        """Return the plan in a message; raise CoterieError if it is invalid or has a different protocol."""
        if len(text) > _MAX_CHARACTERS:
            raise CoterieError(f"the cloud's plan cannot be read: it has more than {_MAX_CHARACTERS} characters")
        try:
            fields = json.loads(text)
            check_protocol(fields)
            plan = FederationPlan(**fields)
            plan.check_moments()
            if plan.table is not None and plan.shape != (len(plan.table.feature_names),):
                raise ValueError("its table has a different number of features")
            return plan
        except (ValidationError, ValueError, TypeError, RecursionError) as e:
            reason = validation_sentence("plan", e) if isinstance(e, ValidationError) else str(e)
            raise CoterieError(f"the cloud's plan cannot be read: {one_line(reason)}") from e

    @property
    def summary(self) -> dict[str, Any]:
        """The main settings, for the audit log."""
        main = {k: self.settings.get(k) for k in ("method", "model", "rounds", "epochs", "settings")}
        return {k: str(v)[:200] for k, v in {**main, "coterie": self.coterie}.items() if v}

    @property
    def run_settings(self) -> RunSettings:
        """The settings of the run; raises CoterieError if they are invalid."""
        return settings_of_cloud(json.dumps(self.settings))

    def check(self, allow: Allow) -> RunSettings:
        """Return the settings; raise CoterieError if the policy forbids the plan or the method's code differs."""
        settings = self.run_settings
        allow.check_plan(settings)
        if method_digest(find(settings.method)) != self.source:
            raise CoterieError(
                f'the code of the method "{settings.method}" here (Coterie {version("coterie")}) differs from that of '
                f"the cloud (Coterie {self.coterie})"
            )
        return settings

    def session(
        self,
        data: str | None,
        client: int | None,
        data_dir: Path | None,
        allow: Allow,
        timeline: str | tuple[Change, ...] | None = None,
    ) -> Session:
        """Return the run as this host takes part in it.

        `client` is the client whose part of the named data this host uses. If it is None, `data` is the host's own
        data, which change by `timeline`. If `data` is None too, the host is an edge.
        """
        if timeline is not None and self.partition is not None:
            raise CoterieError("the timeline of a named data set is a setting of the run; leave out --timeline")
        settings, engine = self.check(allow), Engine(data_dir=data_dir)
        torch.set_num_threads(1)
        self._check_model_size(settings, allow)
        if client is not None and data is not None:
            session = prepare(settings.model_copy(update={"data": data}), engine)
            if session.federation.identity != self.partition:
                raise CoterieError(f'the partition of "{data}" differs from that of the cloud; are the data the same?')
        elif data is not None and self.partition is not None:
            raise CoterieError("the cloud uses a named data set in this run; set the client of this device (--client)")
        else:
            session = bind(
                settings,
                engine,
                build_method(settings.method, settings.settings),
                self._federation(settings, data, data_dir, timeline),
            )
        for name, digest in session.code_digests().items():
            if self.code.get(name) != digest:
                path = getattr(settings, name.split()[0])
                raise CoterieError(f"the code of {name} = {path} here differs from that of the cloud")
        if _tree_digest(session.method.ctx.w0) != self.w0:
            raise CoterieError(f"the initial model differs from the cloud's (torch {torch.__version__} here)")
        allow.check_session(session, None if data is None else len(session.federation.data(client or 0).train))
        return session

    def _check_model_size(self, settings: RunSettings, allow: Allow) -> None:
        outputs, with_norm = self._example().task.outputs, settings.model == WITH_NORM
        with_norm = with_norm or "bn" in find(settings.method).needs
        dtype = torch.int64 if self.kind == "int64" else torch.float32
        default = default_for(self.shape, outputs, dtype, with_norm, self.task)
        allow.check_model_size(settings, self.shape, outputs, self.vocab, default)

    def _example(self) -> Dataset:
        task = tasks.task_name(self.task)
        return example_dataset(
            self.shape, self.classes, self.kind, self.vocab, self.mean, self.std, task, self.targets, self.table
        )  # fmt: skip

    def _federation(
        self,
        settings: RunSettings,
        data: str | None,
        data_dir: Path | None,
        timeline: str | tuple[Change, ...] | None,
    ) -> DeviceFederation:
        """Return the federation as a device with its own data, or an edge without data, knows it."""
        like, own = self._example(), None
        if data is not None:
            kind = "classification" if like.task.classes else like.kind
            columns = None if self.table is None else settings.columns.model_copy(update={"one_client": True})
            dataset = with_task(load_dataset(data, data_dir, task=kind, columns=columns), kind)
            partition = settings.federation.model_copy(update={"timeline": timeline})
            own = only_client(dataset, like, partition, settings.seed)
        return DeviceFederation(like, settings.federation, settings.seed, self.places, own, edge=data is None)


def settings_of_cloud(text: str) -> RunSettings:
    """Return the settings in a message of the cloud; raise CoterieError if they are invalid."""
    try:
        return RunSettings.model_validate_json(text)
    except ValidationError as e:
        raise CoterieError(validation_sentence("the cloud's settings", e)) from None


def _tree_digest(tree: Tree) -> str:
    digest = hashlib.sha256()
    for name in sorted(tree):
        v = tree[name].detach().contiguous()
        digest.update(f"{name} {v.dtype} {tuple(v.shape)}".encode())
        digest.update(v.reshape(-1).view(torch.uint8).numpy().tobytes() if v.numel() else b"")
    return digest.hexdigest()
