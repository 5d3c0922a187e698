"""A round as a pure step: (server, edges, plan, answers) -> RoundResult, with the next server and edge states.

`plan` chooses the participants and their downloads; a runtime turns the plan into answers; `close` computes the next
server state from them. Nothing here opens a file, knows a process or holds the state of a client.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from coterie.core import tree as T
from coterie.core.context import ClientId, EdgeId, State
from coterie.core.edges import Edge, EdgeMethod
from coterie.core.method import Download, Method, Moment, Upload
from coterie.core.rng import torch_rng
from coterie.core.schema import NonFiniteError, Schema
from coterie.core.tree import Tree
from coterie.engine import ledger
from coterie.engine.combining import Combiner
from coterie.engine.ledger import DEVICE_CLOUD, DEVICE_EDGE, EDGE_CLOUD, summed
from coterie.engine.messages import Bytes, MergeAnswer, MergeRequest, TrainAnswer, TrainRequest
from coterie.errors import CoterieError
from coterie.privacy.secure_sum.messages import SummedWords

Edges = Mapping[EdgeId, State]


@dataclass(frozen=True)
class Rules:
    """Settings of a round in addition to the method."""

    seed: int
    dropout: float = 0.0  # share of the sampled clients that fail
    stragglers: float = 0.0  # share of the sampled clients that train fewer epochs
    watch: bool = True  # score participants before and after local training
    log_updates: bool = False
    poisson: bool = False  # every client takes part with probability `join`, independently of all others
    secret: bool = False  # the participants cannot be computed from the seed
    weight_cap: float | None = None  # largest number of samples that counts, as a multiple of the median


@dataclass(frozen=True)
class RoundPlan:
    """The participants of a round, and their requests."""

    round: int
    participants: tuple[ClientId, ...]
    failing: frozenset[ClientId]  # participants that are drawn to fail
    direct: tuple[TrainRequest, ...]  # requests to clients that talk to the cloud
    edges: tuple[MergeRequest, ...]  # requests to edges, for their clients
    down: Bytes  # declared bytes to the clients that talk to the cloud
    edges_down: Bytes
    shared: Tree = field(default_factory=dict)  # part of the download that all clients get
    weight_cap: float | None = None


@dataclass(frozen=True)
class RoundAnswers:
    """The answers of a round, in any order."""

    trained: Mapping[ClientId, TrainAnswer]
    merged: Mapping[EdgeId, MergeAnswer] = field(default_factory=dict)
    missing: Mapping[ClientId, str] = field(default_factory=dict)  # clients that did not answer, and why
    refused: Mapping[ClientId, str] = field(default_factory=dict)  # answers that the runtime refused, and why
    summed: SummedWords | None = None  # the sum of the uploads of all clients in `trained`, which have no single ones
    sum_bytes: ledger.Page = field(default_factory=dict)  # declared bytes of the messages that led to the sum


@dataclass(frozen=True)
class RoundResult:
    server: State
    edges: dict[EdgeId, State]
    accepted: list[ClientId]  # their new states are kept
    failed: list[ClientId]
    nonfinite: list[ClientId]  # excluded because their uploads hold NaN or infinity
    refused: dict[ClientId, str]  # excluded because of the content of their uploads, with reasons
    reasons: dict[ClientId, str]  # reasons of missing and refused clients, except those drawn to fail
    bytes: ledger.Page
    combiner: Combiner | None = None  # after this round
    doubtful: frozenset[ClientId] = frozenset()  # refused clients whose upload may not be the cause
    capped: Mapping[ClientId, int] = field(default_factory=dict)  # samples that count, of clients that claim more

    @property
    def left_out(self) -> dict[ClientId, str]:
        """The excluded clients, with reasons: they were asked, and their answers do not count."""
        return {**self.reasons, **dict.fromkeys(self.nonfinite, "the upload has NaN or infinity")}


def plan(
    method: Method, server: State, edges: Edges, round: int, rules: Rules, combiner: Combiner | None = None
) -> RoundPlan:
    sampled = _poisson(method, round, rules) if rules.poisson else _sampled(method, server, round, rules)
    if strange := set(sampled) - set(method.ctx.clients):
        name = type(method).__name__
        raise CoterieError(f"{name}.sample returned {min(strange)!r}, which is not the number of a client that trains")
    ids = tuple(sorted(set(sampled)))
    failing = frozenset(i for i in ids if _drawn(rules.seed, "dropout", round, i, rules.dropout))
    sent = method.down(server, ids, round)

    clip = None if combiner is None else combiner.clip

    def request(i: ClientId) -> TrainRequest:
        slow = _drawn(rules.seed, "straggler", round, i, rules.stragglers)
        share = float(torch.rand((), generator=torch_rng(rules.seed, "share", round, i))) if slow else 1.0
        return TrainRequest(i, round, share=share, watch=rules.watch, log_update=rules.log_updates, clip=clip)

    attached = attach(method, server, edges, sent, ids)
    served = {i for edge, _ in attached for i in edge.clients}
    asked = [i for i in ids if i not in failing]
    tasks = []
    for edge, members in attached:
        requests = tuple(request(i) for i in members if i not in failing)
        schemas = {r.client: method.schema("up", Moment(server, r.client, round)) for r in requests}
        tasks.append(MergeRequest(edge, round, members, requests, schemas, rules.weight_cap))
    down, edges_down = method.schema("down"), method.schema("edge_down")
    return RoundPlan(
        round=round,
        participants=ids,
        failing=failing,
        direct=tuple(
            replace(request(i), shared=sent.shared, own=sent.each.get(i, {})) for i in asked if i not in served
        ),
        edges=tuple(tasks),
        down=summed(down.parts(sent.to(i)) for i in ids if i not in served),
        edges_down=summed(edges_down.parts(tree) for edge, _ in attached for tree in edge.received),
        shared=sent.shared,
        weight_cap=rules.weight_cap,
    )


def _sampled(method: Method, server: State, round: int, rules: Rules) -> list[ClientId]:
    return method.sample(server, round, torch_rng(rules.seed, "sample", round))


def _poisson(method: Method, round: int, rules: Rules) -> list[ClientId]:
    """Return the clients that an independent draw of each selects; there may be none."""
    clients = method.ctx.clients
    if rules.secret:
        draw = secrets.SystemRandom()
        return [i for i in clients if draw.random() < method.ctx.join]
    return [i for i in clients if _drawn(rules.seed, "poisson", round, i, method.ctx.join)]


def attach(
    method: Method, server: State, edges: Edges, sent: Download, ids: Sequence[ClientId]
) -> list[tuple[Edge, tuple[ClientId, ...]]]:
    """Return the edges that serve these clients, each with its download and its clients among them."""
    layout = method.edges(server) if isinstance(method, EdgeMethod) else None
    wanted = set(ids)
    attached = []
    for e, members in sorted((layout or {}).items()):
        if served := tuple(i for i in members if i in wanted):
            each = {i: sent.each[i] for i in members if i in sent.each}
            its = Download(sent.shared, each, {e: sent.edge[e]} if e in sent.edge else {})
            attached.append((Edge(e, tuple(members), edges.get(e, {}), its), served))
    return attached


def close(
    method: Method,
    server: State,
    edges: Edges,
    plan: RoundPlan,
    answers: RoundAnswers,
    combiner: Combiner | None = None,
) -> RoundResult:
    page: ledger.Page = {}
    if plan.edges:
        ledger.add_bytes(page, EDGE_CLOUD, "down", plan.edges_down)
        ledger.add_bytes(page, DEVICE_EDGE, "down", summed(m.down for m in answers.merged.values()))
    if len(plan.participants) > sum(len(task.clients) for task in plan.edges):
        ledger.add_bytes(page, DEVICE_CLOUD, "down", plan.down)

    arrived = [answers.trained[r.client] for r in plan.direct if r.client in answers.trained]
    schemas = {a.client: method.schema("up", Moment(server, a.client, plan.round)) for a in arrived}
    secure = None if combiner is None or plan.round == 0 else combiner.secure
    cap = None if secure is not None else plan.weight_cap  # a secure sum has a cap of its own
    direct = receive(schemas, arrived, cap) if answers.summed is None else Received()
    claimed = {a.client: a.samples for a in arrived}
    capped = {u.sender: u.samples for u in direct.uploads if u.samples < claimed[u.sender]}
    if secure is not None and (arrived or answers.sum_bytes):  # single uploads do not cross a link
        page = ledger.total([page, answers.sum_bytes or secure.traffic(method, len(arrived))])
    elif arrived:
        ledger.add_bytes(page, DEVICE_CLOUD, "up", summed(direct.bytes.values()))

    missing, refused, nonfinite = dict(answers.missing), {**answers.refused, **direct.refused}, list(direct.nonfinite)
    doubtful: set[ClientId] = set()
    merged: list[Upload] = []
    new_edges = dict(edges)
    accepted = [u.sender for u in direct.uploads]
    for task in plan.edges:
        e, theirs = task.edge.id, {r.client for r in task.requests}
        if e not in answers.merged:
            continue
        answer = answers.merged[e]
        refused |= {i: why for i, why in answer.refused.items() if i in theirs}
        nonfinite += [i for i in answer.nonfinite if i in theirs]
        if answer.up or answer.senders:
            ledger.add_bytes(page, DEVICE_EDGE, "up", answer.up)
        if not answer.senders:
            continue
        try:
            schema = method.schema("edge_up", Moment(server, e, plan.round))
            schema.check(answer.upload, f"the upload of edge {e}", answer.samples)
        except CoterieError as error:
            refused |= dict.fromkeys(answer.senders, str(error))
            doubtful |= set(answer.senders) if len(answer.senders) > 1 else set()
            continue
        ledger.add_bytes(page, EDGE_CLOUD, "up", method.schema("edge_up").parts(answer.upload))
        new_edges[e] = answer.state
        merged.append(answer.as_upload)
        accepted += (senders := [i for i in answer.senders if i in theirs])
        claims = {i: answers.trained[i].samples for i in senders if i in answers.trained}
        capped |= {i: n for i, n in counted_samples(claims, plan.weight_cap).items() if n < claims[i]}

    uploads = [*merged, *direct.uploads]
    if secure is not None and 0 < len(uploads) < secure.fewest:
        why = f"there is no sum of {len(uploads)} clients, as secure = {secure.text} says"
        missing |= dict.fromkeys(accepted, why)
        uploads, accepted = [], []
    if secure is not None and combiner is not None and answers.summed is not None:
        samples = sum(a.samples for a in arrived)
        upload, combiner = combiner.from_sum(method, plan.shared, answers.summed, samples, plan.round)
        uploads, accepted = [upload], list(answers.summed.clients)
    elif combiner is not None and plan.round > 0 and (uploads or combiner.always):
        upload, combiner = combiner.combined(method, plan.shared, uploads, plan.round)
        uploads = [upload]
    if uploads:
        server = method.aggregate(server, uploads, plan.round)
    reasons = {**missing, **refused}
    return RoundResult(
        server=server,
        edges=new_edges,
        accepted=sorted(accepted),
        failed=sorted({*plan.failing, *reasons}),
        nonfinite=sorted(nonfinite),
        refused=refused,
        reasons=dict(sorted(reasons.items())),
        bytes=page,
        combiner=combiner,
        doubtful=frozenset(doubtful),
        capped=dict(sorted(capped.items())),
    )


@dataclass
class Received:
    """Uploads after their check."""

    uploads: list[Upload] = field(default_factory=list)
    refused: dict[ClientId, str] = field(default_factory=dict)  # why
    nonfinite: list[ClientId] = field(default_factory=list)
    bytes: dict[ClientId, Bytes] = field(default_factory=dict)  # bytes of all uploads: they have crossed the link


def receive(
    schemas: Mapping[ClientId, Schema], answers: Sequence[TrainAnswer], weight_cap: float | None = None
) -> Received:
    """Keep the uploads that are what their schemas declare, with the numbers of samples that count."""
    got = Received()
    for a in answers:
        schema = schemas[a.client]
        try:
            schema.check(a.upload, "the upload", a.samples)
        except NonFiniteError:
            got.nonfinite.append(a.client)
        except CoterieError as e:
            got.refused[a.client] = str(e)
            got.bytes[a.client] = {"refused": T.nbytes(a.upload)}
            continue
        else:
            got.uploads.append(Upload(a.upload, a.note, a.client, a.samples))
        got.bytes[a.client] = schema.parts(a.upload)
    counted = counted_samples({u.sender: u.samples for u in got.uploads}, weight_cap)
    got.uploads = [replace(u, samples=counted[u.sender]) for u in got.uploads]
    return got


def counted_samples(claimed: Mapping[ClientId, int], weight_cap: float | None) -> dict[ClientId, int]:
    """Return the numbers of samples that count: at most `weight_cap` times the lower median of at least three."""
    if weight_cap is None or len(claimed) < 3:
        return dict(claimed)
    median = sorted(claimed.values())[(len(claimed) - 1) // 2]
    most = int(weight_cap * max(1, median))
    return {i: min(n, most) for i, n in claimed.items()}


def _drawn(seed: int, what: str, round: int, client: ClientId, share: float) -> bool:
    return share > 0 and float(torch.rand((), generator=torch_rng(seed, what, round, client))) < share
