"""The messages between the hosts of a federation, as frozen dataclasses; engine/codec.py turns them into bytes.

There are seven kinds: `columns` (a TableQuestion before the plan of a federation of tables, answered with a device's
TableAnswer or an edge's TableAnswers), `hello` (a PlanText, answered with a device's Hello or an edge's Attached),
`train`, `score`, `send` and `sum` (a DeviceJob or an EdgeJob; trees that all jobs of an exchange share are a separate
part, Common), and `over` (a RunOver, which is sent back). `send` calls devices that have announced their upload: they
send the rest of it. `sum` asks for a step of a secure sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, cast

from torch import Tensor

from coterie.core.context import ClientId
from coterie.core.states import register
from coterie.core.tree import Tree
from coterie.data.table import ColumnStatistics
from coterie.engine.messages import (
    MergeAnswer,
    MergeRequest,
    ScoreAnswer,
    ScoreRequest,
    SendAnswer,
    SendRequest,
    TrainAnswer,
    TrainRequest,
)
from coterie.privacy.secure_sum.messages import (
    IncomingShares,
    MaskedWords,
    NeighbourKeys,
    PublicKeys,
    RevealedShares,
    SealedShares,
    SumTerms,
    Survivors,
)


# ---- secure sums -----------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class SignedKeys:
    """A device's keys for a secure sum, with the certificate whose key has signed them."""

    keys: PublicKeys
    certificate: Tensor  # uint8, DER
    knows: Mapping[ClientId, str]  # fingerprints of the certificates of other clients that the device has


@register
@dataclass(frozen=True)
class OfferedKeys:
    """The keys of a device's neighbours in a secure sum, and the certificates that the device does not have."""

    neighbours: NeighbourKeys
    certificates: Mapping[ClientId, Tensor]  # uint8, DER


@register
@dataclass(frozen=True)
class SumRequest:
    """Asks a device for the next step of a secure sum of this round's uploads."""

    client: ClientId
    round: int
    ask: SumTerms | OfferedKeys | IncomingShares | Survivors

    @property
    def data_round(self) -> int:
        """The round whose data were used."""
        return self.round


@register
@dataclass(frozen=True)
class SumAnswer:
    """A device's answer to a step of a secure sum."""

    client: ClientId
    give: SignedKeys | SealedShares | MaskedWords | RevealedShares


JobKind = Literal["train", "score", "send", "sum"]
Request = TrainRequest | ScoreRequest | SendRequest | SumRequest
Answer = TrainAnswer | ScoreAnswer | SendAnswer | SumAnswer


# ---- columns of tables -----------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class TableQuestion:
    """Asks a device for statistics of its table's columns, from which the cloud makes the common encoding."""

    settings: str  # RunSettings of the run as JSON; they name the columns and decide the training rows


@register
@dataclass(frozen=True)
class TableAnswer:
    """Facts about the training rows of a device's table."""

    columns: Mapping[str, ColumnStatistics]  # features, and the targets of a regression
    features: tuple[str, ...]  # names of the features in the order of the table
    task: str
    classes: tuple[str, ...]  # classes or labels that occur; empty if targets are numbers


@register
@dataclass(frozen=True)
class TableAnswers:
    """The answers of the devices of an edge about their tables."""

    devices: Mapping[str, TableAnswer]  # by name
    refused: Mapping[str, str]  # reasons by name


# ---- hello -----------------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class PlanText:
    """The federation plan of a run (plan.py), as JSON."""

    text: str


@register
@dataclass(frozen=True)
class Hello:
    """A device's answer to a plan that it accepts."""

    client: ClientId | None  # the seat that the device wants or had before; None: any seat
    samples: int  # number of training samples
    later: Mapping[int, int] = field(default_factory=dict)  # number of samples by first round, if it changes

    def samples_in(self, round: int) -> int:
        """Return the number of training samples in a round."""
        return next((self.later[t] for t in sorted(self.later, reverse=True) if t <= round), self.samples)


@register
@dataclass(frozen=True)
class Attached:
    """An edge's answer to a plan: its devices, by the names in its own list of nodes."""

    devices: Mapping[str, Hello]
    refused: Mapping[str, str]  # devices that refused the plan, with their reasons


@register
@dataclass(frozen=True)
class RunOver:
    """Tells that a run has finished all its rounds."""

    run: str
    rounds: int


# ---- jobs ------------------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class Common:
    """The trees that all jobs of one exchange share."""

    shared: Tree = field(default_factory=dict)
    global_model: Tree | None = None


@register
@dataclass(frozen=True)
class DeviceJob:
    """A request to a device."""

    run: str
    base: int  # round whose client state the job starts from; -1: the client has no state yet
    request: Request


@register
@dataclass(frozen=True)
class EdgeJob:
    """Requests to the devices behind an edge; the edge passes the answers on or merges them."""

    run: str
    deadline: float  # seconds within which the cloud expects the answer
    names: Mapping[ClientId, str]  # the edge's names of the requested devices
    base: Mapping[ClientId, int]  # round whose state each client starts from, see DeviceJob
    requests: tuple[Request, ...]
    merges: tuple[MergeRequest, ...]
    norm_bound: float = 0.0  # largest size of an upload, in multiples of the usual size; 0: no bound


@register
@dataclass(frozen=True)
class WireBytes:
    """Bytes sent between an edge and its devices."""

    payload_down: int = 0
    payload_up: int = 0
    total_down: int = 0
    total_up: int = 0


@register
@dataclass(frozen=True)
class EdgeAnswer:
    """An edge's answer to an EdgeJob."""

    answers: tuple[Answer, ...]  # answers of devices, without the uploads that were merged
    missing: Mapping[ClientId, str]  # clients without an answer, with the reasons
    merged: tuple[MergeAnswer, ...]
    wire: WireBytes
    refused: Mapping[ClientId, str] = field(default_factory=dict)  # refused answers, with the reasons


NodeJob = DeviceJob | EdgeJob
_J = TypeVar("_J", bound=NodeJob)


def split_common(jobs: Mapping[str, NodeJob]) -> tuple[Common, dict[str, NodeJob]]:
    """Return the trees that all jobs share, and the jobs without these trees."""
    trees = [tree for job in jobs.values() for tree in _shared_trees(job)]
    first = trees[0] if trees else {}
    shared = {k: v for k, v in first.items() if all(k in t and t[k] is v for t in trees)}
    scored = (r for job in jobs.values() for r in _requests(job) if isinstance(r, ScoreRequest))
    global_model = next((r.global_model for r in scored), None)

    def rest(tree: Tree) -> Tree:
        return {k: v for k, v in tree.items() if k not in shared}

    return Common(shared, global_model), {name: _with_trees(job, rest, None) for name, job in jobs.items()}


def with_common(common: Common, job: _J) -> _J:
    """Return a job with the shared trees put back: the inverse of split_common."""
    return cast(_J, _with_trees(job, lambda tree: {**common.shared, **tree}, common.global_model))


def _requests(job: NodeJob) -> Sequence[Request]:
    return (job.request,) if isinstance(job, DeviceJob) else job.requests


def _shared_trees(job: NodeJob) -> Iterator[Tree]:
    yield from (r.shared for r in _requests(job) if isinstance(r, TrainRequest | ScoreRequest))
    if isinstance(job, EdgeJob):
        yield from (task.edge.download.shared for task in job.merges)


def _with_trees(job: NodeJob, change: Callable[[Tree], Tree], global_model: Tree | None) -> NodeJob:
    """Return the job with `change` applied to its shared trees, and with this global model to score."""

    def request(r: Request) -> Request:
        if isinstance(r, SendRequest | SumRequest):
            return r
        if isinstance(r, ScoreRequest):
            return replace(r, shared=change(r.shared), global_model=global_model)
        return replace(r, shared=change(r.shared))

    def merge(task: MergeRequest) -> MergeRequest:
        sent = task.edge.download
        return replace(task, edge=replace(task.edge, download=replace(sent, shared=change(sent.shared))))

    if isinstance(job, DeviceJob):
        return replace(job, request=request(job.request))
    return replace(job, requests=tuple(map(request, job.requests)), merges=tuple(map(merge, job.merges)))
