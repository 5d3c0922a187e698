"""Values of one exchange with the nodes: the jobs that go out, the answers that come back, and a round's outcome."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coterie.core import tree as T
from coterie.core.context import ClientId, EdgeId
from coterie.core.method import Method
from coterie.engine.messages import MergeAnswer, MergeRequest
from coterie.engine.round import RoundAnswers
from coterie.federation.cloud.membership import Membership
from coterie.federation.cloud.upload_bounds import Judgement
from coterie.federation.protocol.messages import Answer, DeviceJob, EdgeJob, NodeJob, Request
from coterie.federation.transport import Cause, Failure
from coterie.federation.validation import largest_message


@dataclass
class Jobs:
    """The jobs of one exchange, by name of the node, and the requests that each node answers."""

    by_node: dict[str, NodeJob] = field(default_factory=dict)
    requests: dict[str, list[Request]] = field(default_factory=dict)
    absent: list[ClientId] = field(default_factory=list)  # clients that are not connected and not asked

    @property
    def round(self) -> int:
        """The round of the requests; 0 without requests."""
        return next((r.round for requests in self.requests.values() for r in requests), 0)

    def largest_reply(self, method: Method) -> int:
        """Return the number of bytes that a reply may have; the state of an edge can only be estimated."""
        device = largest_message(method, ["up"])
        state = (largest_message(method, ["edge_up", "up", "down"]) + T.nbytes(method.ctx.w0)) * 4
        sizes = [
            device
            if isinstance(job, DeviceJob)
            else device * len(job.names) + sum(state * (1 + len(task.edge.clients)) for task in job.merges)
            for job in self.by_node.values()
        ]
        return max(sizes, default=0)


def make_jobs(
    membership: Membership,
    run: str,
    deadline: float,
    norm_bound: float,
    requests: Sequence[Request],
    merges: Iterable[tuple[str, MergeRequest]],  # tasks for edges, each with the edge's name
) -> Jobs:
    """Assign every request to the node that leads to its client: the device itself, or the edge it is behind."""
    jobs, roster, versions = Jobs(), membership.roster, membership.versions
    passed: dict[str, list[Request]] = {}  # requests that an edge passes on unchanged
    tasks: dict[str, list[MergeRequest]] = {}
    for request in requests:
        if request.client not in membership.connected:
            jobs.absent.append(request.client)
            continue
        entry = roster.entries[request.client]
        jobs.requests.setdefault(entry.via, []).append(request)
        if entry.edge is not None:
            passed.setdefault(entry.edge, []).append(request)
        else:
            jobs.by_node[entry.name] = DeviceJob(run, versions.base(request.client), request)
    for edge, task in merges:
        tasks.setdefault(edge, []).append(task)
        jobs.requests.setdefault(edge, []).extend(task.requests)
    for edge in sorted({*passed, *tasks}):
        clients = [r.client for r in jobs.requests[edge]]
        jobs.by_node[edge] = EdgeJob(
            run,
            deadline,
            {i: roster.entries[i].device for i in clients},
            {i: versions.base(i) for i in clients},
            tuple(passed.get(edge, ())),
            tuple(tasks.get(edge, ())),
            norm_bound,
        )
    return jobs


@dataclass
class Collected:
    """The answers of one exchange after the checks of their form."""

    answers: dict[ClientId, Answer] = field(default_factory=dict)
    merged: dict[EdgeId, MergeAnswer] = field(default_factory=dict)  # clusters that nodes have merged
    missing: dict[ClientId, str] = field(default_factory=dict)  # reason why no answer came
    absent: set[ClientId] = field(default_factory=set)  # missing: not connected, not in time, or not asked
    refused: dict[ClientId, str] = field(default_factory=dict)  # reason why the answer was refused
    refused_node: set[ClientId] = field(default_factory=set)  # refused clients whose node's whole reply was refused

    def fail(self, clients: Iterable[ClientId], failure: Failure) -> None:
        """Record that the node of these clients gave no reply, or a damaged one."""
        reasons = dict.fromkeys(clients, failure.why)
        if failure.cause is Cause.WRONG:
            self.refuse_node(reasons, failure.why)
        else:
            self.missing |= reasons
        if failure.passing:
            self.absent |= reasons.keys()

    def refuse_node(self, clients: Iterable[ClientId], reason: str) -> None:
        """Record that the whole reply of a node, which answers for these clients, is refused."""
        reasons = dict.fromkeys(clients, reason)
        self.refused |= reasons
        self.refused_node |= reasons.keys()

    def add_failures(self, other: "Collected") -> None:
        """Add the clients that a later exchange of the same round lost."""
        self.missing |= other.missing
        self.absent |= other.absent
        self.refused |= other.refused
        self.refused_node |= other.refused_node

    @property
    def excluded(self) -> dict[ClientId, str]:
        """Clients without an answer that counts, with the reason."""
        return {**self.missing, **self.refused}


@dataclass(frozen=True)
class RoundTrip(RoundAnswers):
    """The answers of a round, with details that the cloud needs to conclude the round."""

    asked: frozenset[ClientId] = frozenset()  # connected clients that the round asked
    absent: frozenset[ClientId] = frozenset()  # missing clients that were not connected, not in time, or not asked
    refused_node: frozenset[ClientId] = frozenset()  # refused clients whose node's whole reply was refused
    merged_remotely: frozenset[ClientId] = frozenset()  # clients whose uploads were merged on a node
    sizes: Judgement = field(default_factory=Judgement)  # sizes of the clients' uploads
    spent: bool = False  # a secure sum was begun that cannot be begun again in this round
    merged_sizes: Judgement = field(default_factory=Judgement)  # sizes of the edges' merged uploads
