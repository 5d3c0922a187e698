"""All messages of a round as frozen dataclasses: requests, answers, and the fields that a runtime adds to them.

codec.py writes and reads them between processes, between hosts and in checkpoints. `check` raises CoterieError with one
sentence for a wrong message from another host; the method's schema checks whether the payload is as declared.
"""

import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from coterie.core.context import ClientId, EdgeId, EdgeState, State
from coterie.core.edges import Edge
from coterie.core.method import Download, Upload
from coterie.core.schema import Entry, Schema
from coterie.core.states import register
from coterie.core.tasks import Task
from coterie.core.tree import Tree
from coterie.core.views import RequestedView
from coterie.errors import CoterieError

Bytes = dict[str, int]  # bytes by heading of the ledger

for _known in (Download, Edge, Entry, Schema, Upload):
    register(_known)


@register
@dataclass(frozen=True)
class Score:
    """The score of one model on one part of one client's data."""

    counts: Mapping[str, Tensor]  # sums over samples that the task's metrics are made of (tasks.py)
    loss: float  # summed over samples
    samples: tuple[Tensor, ...] = ()  # predictions and targets, if a metric needs them; a simulation only


# ---- a round ---------------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class TrainRequest:
    """A client's part of a round."""

    client: ClientId
    round: int
    shared: Tree = field(default_factory=dict)  # part of the download that all participants get
    own: Tree = field(default_factory=dict)  # part of the download for this client alone
    share: float = 1.0  # share of its local epochs; below 1 for a straggler
    watch: bool = False  # score the personal model before and after local training
    log_update: bool = False  # send the change of the personal model, for the log of a simulation
    clip: float | None = None  # largest norm of the change that is uploaded, if it is not that of the settings

    @property
    def download(self) -> Tree:
        return {**self.shared, **self.own}

    @property
    def data_round(self) -> int:
        """The round whose data are used."""
        return self.round


@register
@dataclass(frozen=True)
class TrainAnswer:
    client: ClientId
    upload: Tree
    note: Mapping[str, float]
    samples: int  # training samples of the client
    steps: int
    loss: float
    before: Score | None = None
    after: Score | None = None
    update: Tensor | None = None  # [P]
    seen: int = 0  # samples of all steps of local training


@register
@dataclass(frozen=True)
class SendRequest:
    """Calls a client: it sends the rest of the upload that it announced in this round."""

    client: ClientId
    round: int

    @property
    def data_round(self) -> int:
        """The round whose data were used."""
        return self.round


@register
@dataclass(frozen=True)
class SendAnswer:
    client: ClientId
    upload: Tree  # the upload except its announced entries
    samples: int  # training samples of the client


@register
@dataclass(frozen=True)
class MergeRequest:
    """An edge's part of a round: relay the download, let its clients train, and merge their uploads."""

    edge: Edge
    round: int
    clients: tuple[ClientId, ...]  # its sampled clients, including those drawn to fail
    requests: tuple[TrainRequest, ...]  # requests of the others; the edge fills in the download
    schemas: Mapping[ClientId, Schema]  # schema of each client's upload
    weight_cap: float | None = None  # largest number of samples that counts, as a multiple of the median


@register
@dataclass(frozen=True)
class MergeAnswer:
    edge: EdgeId
    state: EdgeState
    upload: Tree
    note: Mapping[str, float]
    senders: tuple[ClientId, ...]  # clients whose uploads were merged
    samples: int  # training samples of the senders
    down: Bytes  # sent to its clients
    up: Bytes  # received from them
    refused: Mapping[ClientId, str]  # uploads that do not fit the schema, and why
    nonfinite: tuple[ClientId, ...]  # uploads with NaN or infinity

    @property
    def as_upload(self) -> Upload:
        return Upload(self.upload, self.note, self.edge, self.samples)


# ---- evaluation ------------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class ScoreRequest:
    """A request to score all views of one client's models; no state changes."""

    client: ClientId
    round: int  # the next one
    shared: Tree = field(default_factory=dict)
    own: Tree = field(default_factory=dict)
    global_model: Tree | None = None
    more: tuple[RequestedView, ...] = ()  # views in addition to personal, global and adapted
    official: bool = False  # also on the official test part; a simulation only

    @property
    def download(self) -> Tree:
        return {**self.shared, **self.own}

    @property
    def data_round(self) -> int:
        """The round whose data are used: the last one that was trained."""
        return self.round - 1


@register
@dataclass(frozen=True)
class ScoreAnswer:
    client: ClientId
    scores: Mapping[str, Score]  # by "view/part"
    samples: int
    model: Tree | None = None  # the personal model, where the official score needs the mean of all; a simulation only
    steps: int = 0  # number of fine-tuning steps, for the view adapted
    seen: int = 0  # samples of these steps


# ---- between a runtime and its processes -----------------------------------------------------------------------------
class Remote(ABC):
    """A reference to a client's state in a cluster; jobs carry the reference, and only checkpoints fetch the state."""

    @abstractmethod
    def fetch(self) -> State: ...


@register
@dataclass(frozen=True)
class Job:
    """A request with the state of its client (None if it has none yet)."""

    request: TrainRequest | ScoreRequest
    state: State | Remote | None


@register
@dataclass(frozen=True)
class TrainResult:
    """An answer with the client's new state, which stays with the runtime."""

    answer: TrainAnswer
    state: State | Remote
    cpu: float = 0.0  # processor seconds of the client's training


# ---- messages from other hosts ---------------------------------------------------------------------------------------
M = TypeVar("M")


def check_message(message: Any, kind: type[M]) -> M:
    """Return the message; raise CoterieError unless it is of this kind and all its fields have their types."""
    if type(message) is not kind:
        raise CoterieError(f"expected a {kind.__name__}, got a {type(message).__name__}")
    for name, hint in _hints(kind).items():  # type: ignore[arg-type]
        value = getattr(message, name)
        is_state = name != "state" or isinstance(value, dict) or is_dataclass(value)
        if not (is_state and _fits(value, hint)):
            raise CoterieError(f"the field {name} of a {kind.__name__} has an impossible value")
    return message


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _fits(v: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(v, h) for h in inner)
    if hint is float:
        return type(v) is float or (type(v) is int and abs(v) < 2**53)
    if hint is int:
        return type(v) is int and -1 <= v < 2**53
    if hint in (bool, str, type(None)):
        return type(v) is hint
    if origin is Literal:
        return type(v) is str and v in inner
    if hint is Tensor or hint is torch.dtype:
        return isinstance(v, hint)
    if origin in (dict, Mapping):
        return isinstance(v, dict) and all(_fits(k, inner[0]) and _fits(x, inner[1]) for k, x in v.items())
    if origin in (tuple, list):
        return isinstance(v, list | tuple) and all(_fits(x, inner[0]) for x in v)
    if is_dataclass(hint):
        return type(v) is hint and all(_fits(getattr(v, n), h) for n, h in _hints(hint).items())  # type: ignore[arg-type]
    return False


def check_score(score: Score, task: Task) -> None:
    """Raise CoterieError if the counts of a score are impossible in this task; any loss may be true."""
    counts = dict(score.counts)
    if score.samples:
        raise CoterieError("a score from another host holds predictions for single samples")
    task.check(counts)
