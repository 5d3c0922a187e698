"""The plan that the cloud sends to every party: settings, model, versions. JSON, checked on arrival."""

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
from coterie.data.sources import load_dataset
from coterie.data.target_types import with_task
from coterie.engine.provenance import method_digest
from coterie.engine.session import Session, bind, prepare
from coterie.errors import CoterieError
from coterie.errors import sentence as one_line
from coterie.federation.device_data import DeviceFederation, example_dataset, only_client
from coterie.federation.policy.allow import Allow
from coterie.federation.protocol.version import PROTOCOL, check_protocol
from coterie.methods import build, resolve, sentence

RUN_ID = re.compile("[0-9a-f]{32}")
_MAX_CHARACTERS = 2**24  # characters of a plan
_MAX_LENGTH = 2**20  # classes, targets, numbers in one dimension of an item
_Length = Annotated[int, Field(ge=1, le=_MAX_LENGTH)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]


class FederationPlan(BaseModel):
    """A run, as devices and edges know it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    protocol: int = PROTOCOL
    coterie: str  # version of the cloud's package, for people
    run: str = Field(pattern=f"^{RUN_ID.pattern}$")
    source: str  # digest of the method's code
    settings: dict[str, Any]  # RunSettings
    places: int = Field(ge=1, le=10**7)
    partition: dict[str, Any] | None  # of named data that every party deals out itself; None: devices bring their own
    shape: tuple[_Length, ...] = Field(max_length=8)
    task: str  # a name of tasks.py
    targets: int = Field(ge=1, le=_MAX_LENGTH)  # numbers per item; of a class one
    classes: tuple[str, ...] = Field(max_length=_MAX_LENGTH)
    kind: Literal["float32", "uint8", "int64"]
    vocab: int | None = Field(ge=1, le=2**24)
    mean: tuple[_Finite, ...] | None = Field(max_length=_MAX_LENGTH)
    std: tuple[_Positive, ...] | None = Field(max_length=_MAX_LENGTH)
    w0: str  # digest of the first model

    @field_validator("shape")
    @classmethod
    def _fits(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if math.prod(shape) > 2**27:
            raise ValueError("an item has too many numbers")
        return shape

    def check_moments(self) -> None:
        """There are as many means and deviations as channels, so that items can be normalised."""
        channels = self.shape[0] if self.shape else 1
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, channels):
                raise ValueError(f"{name} has {len(values)} numbers for {channels} channels")

    @staticmethod
    def of(session: Session, run: str) -> "FederationPlan":
        data, own = session.federation.dataset, isinstance(session.federation, DeviceFederation)
        return FederationPlan(
            run=run, coterie=version("coterie"), source=method_digest(type(session.method)),
            settings=session.settings.model_dump(mode="json"), places=len(session.federation.clients),
            partition=None if own else session.federation.identity, shape=data.shape,
            task=data.kind, targets=data.targets, classes=data.classes,
            kind=str(data.x.dtype).removeprefix("torch."), vocab=data.vocab, mean=data.mean, std=data.std,
            w0=_tree_digest(session.method.ctx.w0),
        )  # fmt: skip

    @staticmethod
    def read(text: str) -> "FederationPlan":
        if len(text) > _MAX_CHARACTERS:
            raise CoterieError(f"the cloud's plan cannot be read: it has more than {_MAX_CHARACTERS} characters")
        try:
            found = json.loads(text)
            check_protocol(found)
            plan = FederationPlan(**found)
            plan.check_moments()
            return plan
        except (ValidationError, ValueError, TypeError, RecursionError) as e:
            reason = sentence("plan", e) if isinstance(e, ValidationError) else str(e)
            raise CoterieError(f"the cloud's plan cannot be read: {one_line(reason)}") from e

    @property
    def summary(self) -> dict[str, Any]:
        """What is asked, in short, for the audit log."""
        asked = {k: self.settings.get(k) for k in ("method", "model", "rounds", "epochs", "settings")}
        return {k: str(v)[:200] for k, v in {**asked, "coterie": self.coterie}.items() if v}

    @property
    def run_settings(self) -> RunSettings:
        try:
            return RunSettings(**self.settings)
        except ValidationError as e:
            raise CoterieError(sentence("the cloud's settings", e)) from None

    def check(self, allow: Allow) -> RunSettings:
        """Is it allowed here, and the same method? A sentence if not."""
        settings = self.run_settings
        allow.check_plan(settings)
        if method_digest(resolve(settings.method, settings.settings)[0]) != self.source:
            here = version("coterie")
            raise CoterieError(
                f'the method "{settings.method}" has other code here (Coterie {here}) than at the cloud '
                f"(Coterie {self.coterie})"
            )
        return settings

    def session(self, data: str | None, client: int | None, data_dir: Path | None, allow: Allow) -> Session:
        """The run on this host: with a `client` its share of named data, else own data; without data an edge."""
        settings, engine = self.check(allow), Engine(data_dir=data_dir)
        torch.set_num_threads(1)
        if client is not None and data is not None:
            session = prepare(settings.model_copy(update={"data": data}), engine)
            if session.federation.identity != self.partition:
                raise CoterieError(f'"{data}" has another partition here than at the cloud; are the data the same?')
        elif data is not None and self.partition is not None:
            raise CoterieError("the cloud uses a named data set in this run; say which client this is (--client)")
        else:
            like = example_dataset(
                self.shape,
                self.classes,
                self.kind,
                self.vocab,
                self.mean,
                self.std,
                tasks.known(self.task),
                self.targets,
            )
            fed, seed = settings.federation, settings.seed
            own = (
                None
                if data is None
                else only_client(with_task(load_dataset(data, data_dir), like.kind), like, fed, seed)
            )
            made = DeviceFederation(like, fed, seed, self.places, own, edge=data is None)
            session = bind(settings, engine, build(settings.method, settings.settings), made)
        if _tree_digest(session.method.ctx.w0) != self.w0:
            raise CoterieError(f"the first model differs from the cloud's (torch {torch.__version__} here)")
        allow.check_session(session, None if data is None else len(session.federation.data(client or 0).train))
        return session


def _tree_digest(tree: Tree) -> str:
    found = hashlib.sha256()
    for name in sorted(tree):
        v = tree[name].detach().contiguous()
        found.update(f"{name} {v.dtype} {tuple(v.shape)}".encode())
        found.update(v.reshape(-1).view(torch.uint8).numpy().tobytes() if v.numel() else b"")
    return found.hexdigest()
