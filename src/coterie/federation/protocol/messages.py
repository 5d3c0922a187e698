"""What travels between the hosts of a federation, as frozen dataclasses; codec.py alone turns them into bytes.

Kinds of messages: `hello` (a PlanText, answered by a device's Hello or an edge's Attached), `train` and `score` (a
DeviceJob or an EdgeJob, with what all of them have in common in a part that crosses to the SuperLink once), and `over`
(a RunOver, which is sent back).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, cast

from coterie.core.method import ClientId
from coterie.core.tree import Tree
from coterie.engine.codec import register
from coterie.engine.messages import MergeAnswer, MergeRequest, ScoreAnswer, ScoreRequest, TrainAnswer, TrainRequest

JobKind = Literal["train", "score"]
Request = TrainRequest | ScoreRequest
Answer = TrainAnswer | ScoreAnswer


# ---- hello -----------------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class PlanText:
    """What a run is (plan.py), as JSON."""

    text: str


@register
@dataclass(frozen=True)
class Hello:
    """What a device says of itself."""

    client: ClientId | None  # the place it wants or has had; None: any
    samples: int  # for training


@register
@dataclass(frozen=True)
class Attached:
    """Who is behind an edge, by the names in its own list of nodes."""

    devices: Mapping[str, Hello]
    refused: Mapping[str, str]  # with the reason


@register
@dataclass(frozen=True)
class RunOver:
    """The run has done all its rounds."""

    run: str
    rounds: int


# ---- jobs ------------------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class Common:
    """What all jobs of one exchange have in common."""

    shared: Tree = field(default_factory=dict)
    global_model: Tree | None = None


@register
@dataclass(frozen=True)
class DeviceJob:
    run: str
    base: int  # the round whose state counts, from which this one starts; -1: there is none yet
    request: Request


@register
@dataclass(frozen=True)
class EdgeJob:
    """Jobs of the devices behind an edge: to be passed on as they are, or to be relayed and merged there."""

    run: str
    deadline: float  # seconds until the cloud wants the answer
    names: Mapping[ClientId, str]  # of the devices that are asked, as the edge knows them
    base: Mapping[ClientId, int]
    requests: tuple[Request, ...]
    merges: tuple[MergeRequest, ...]
    norm_bound: float = 0.0  # times the usual size of an upload; 0: no bound


@register
@dataclass(frozen=True)
class WireBytes:
    """Bytes between an edge and its devices."""

    payload_down: int = 0
    payload_up: int = 0
    total_down: int = 0
    total_up: int = 0


@register
@dataclass(frozen=True)
class EdgeAnswer:
    answers: tuple[Answer, ...]  # without the uploads that were merged
    missing: Mapping[ClientId, str]
    merged: tuple[MergeAnswer, ...]
    wire: WireBytes
    refused: Mapping[ClientId, str] = field(default_factory=dict)  # answers of devices that were refused here


NodeJob = DeviceJob | EdgeJob
_J = TypeVar("_J", bound=NodeJob)


def split_common(jobs: Mapping[str, NodeJob]) -> tuple[Common, dict[str, NodeJob]]:
    """The part that all jobs have in common, and the jobs without it."""
    trees = [tree for job in jobs.values() for tree in _shared(job)]
    first = trees[0] if trees else {}
    shared = {k: v for k, v in first.items() if all(k in t and t[k] is v for t in trees)}
    whole = next((r.global_model for j in jobs.values() for r in _requests(j) if isinstance(r, ScoreRequest)), None)

    def rest(tree: Tree) -> Tree:
        return {k: v for k, v in tree.items() if k not in shared}

    return Common(shared, whole), {name: _changed(job, rest, None) for name, job in jobs.items()}


def with_common(common: Common, job: _J) -> _J:
    """Inverse of split_common, for one job."""
    return cast(_J, _changed(job, lambda tree: {**common.shared, **tree}, common.global_model))


def _requests(job: NodeJob) -> Sequence[Request]:
    return (job.request,) if isinstance(job, DeviceJob) else job.requests


def _shared(job: NodeJob) -> Iterator[Tree]:
    yield from (r.shared for r in _requests(job))
    if isinstance(job, EdgeJob):
        yield from (task.edge.download.shared for task in job.merges)


def _changed(job: NodeJob, change: Callable[[Tree], Tree], whole: Tree | None) -> NodeJob:
    """The job with other shared trees, and this global model to score."""

    def request(r: Request) -> Request:
        if isinstance(r, ScoreRequest):
            return replace(r, shared=change(r.shared), global_model=whole)
        return replace(r, shared=change(r.shared))

    def merge(task: MergeRequest) -> MergeRequest:
        sent = task.edge.download
        return replace(task, edge=replace(task.edge, download=replace(sent, shared=change(sent.shared))))

    if isinstance(job, DeviceJob):
        return replace(job, request=request(job.request))
    return replace(job, requests=tuple(map(request, job.requests)), merges=tuple(map(merge, job.merges)))
