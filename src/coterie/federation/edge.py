"""An edge: a node of the cloud and a server for its own devices. It stores nothing between rounds.

An edge passes hellos and jobs on to its devices. For clusters whose participants are all attached to it, it also does
the work of the method's edges, relay and merge. The state of those edges comes with the job and goes back with the
answer, so an edge that dies loses nothing.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

from coterie.core.context import ClientId
from coterie.core.method import Method
from coterie.core.tree import Tree
from coterie.engine import codec
from coterie.engine.edge_steps import announces
from coterie.engine.messages import SendAnswer, SendRequest, TrainAnswer, check_message
from coterie.errors import CoterieError
from coterie.federation.cloud.dispatch import OVER_SECONDS, Dispatcher, Greeting, excluded_line
from coterie.federation.cloud.upload_bounds import UsualSizes, judge_answers, judge_uploads
from coterie.federation.edge_stage import EdgeStage
from coterie.federation.identity.admin import SUSPENDED
from coterie.federation.identity.authority import Certs
from coterie.federation.identity.roles import NodeRole
from coterie.federation.identity.seats import read_hello
from coterie.federation.payload_kinds import of_job, of_reply
from coterie.federation.policy.allow import Allow
from coterie.federation.policy.audit import AUDIT_FILE, AuditLine, AuditLog
from coterie.federation.protocol.messages import (
    Answer,
    Attached,
    Common,
    DeviceJob,
    EdgeAnswer,
    EdgeJob,
    Hello,
    JobKind,
    PlanText,
    Request,
    RunOver,
    TableAnswer,
    TableAnswers,
    TableQuestion,
    WireBytes,
    with_common,
)
from coterie.federation.protocol.plan import FederationPlan, settings_of_cloud
from coterie.federation.table_inquiry import TABLE_SECONDS, TableInquiry
from coterie.federation.transport import Cause, NodeLink, NoPlanError, listening
from coterie.federation.transport.node import Node
from coterie.federation.validation import SamplesError, check_answer, check_request, check_task, largest_message

_DEVICE_SHARE = 0.85  # share of the cloud's deadline that devices get; the rest is for the reply to the cloud
_TRAIN_SHARE = 0.7  # part of that which training gets, if clients are called for the rest of their uploads
log = logging.getLogger("coterie.edge")


@dataclass(frozen=True)
class EdgeRun:
    """The run of an edge, and the devices that take part in it."""

    plan: FederationPlan
    method: Method
    dispatcher: Dispatcher
    greeting: Greeting
    hellos: dict[str, Hello] = field(default_factory=dict)  # by name of the device
    refused: dict[str, str] = field(default_factory=dict)  # reason by name of the device
    usual: UsualSizes = field(default_factory=UsualSizes)


@dataclass
class Gathered:
    """The answers of an edge's devices, and the reasons for those that are missing or refused."""

    answers: dict[ClientId, Answer] = field(default_factory=dict)
    missing: dict[ClientId, str] = field(default_factory=dict)
    refused: dict[ClientId, str] = field(default_factory=dict)
    wire: WireBytes = field(default_factory=WireBytes)


@dataclass
class EdgeHandler:
    """Answers the cloud by asking the devices of its own link."""

    link: NodeLink
    allow: Allow = field(default_factory=Allow)
    audit: AuditLog | None = None
    peer: str = "cloud"  # address of the cloud
    stay: bool = False  # wait for the next run when one has ended
    ended: Callable[[], None] = lambda: None  # called when a run has ended, unless `stay` is set
    roles: Callable[[], Mapping[str, NodeRole]] = dict  # reads the roles of the edge's own nodes
    _refusal: str = ""  # run and reason of the last refused plan, which the cloud offers again and again
    _run: EdgeRun | None = None
    _tables: TableInquiry | None = None

    def handle(self, kind: str, round: int, shared: memoryview | None, own: memoryview) -> memoryview:
        """Answer a message of the cloud; the transport calls this."""
        message = codec.unpack_foreign(own)
        if kind == "hello":
            return codec.pack(self.hello(check_message(message, PlanText).text))
        if kind == "over":
            return codec.pack(self.over(check_message(message, RunOver)))
        if kind == "columns":
            return codec.pack(self.columns(check_message(message, TableQuestion)))
        common = Common() if shared is None else check_message(codec.unpack_foreign(shared), Common)
        job = with_common(common, check_message(message, EdgeJob))
        if kind not in get_args(JobKind):
            raise CoterieError(f'an edge cannot answer "{kind}"')
        return codec.pack(self.answer(cast(JobKind, kind), round, job))

    # ---- columns of tables -------------------------------------------------------------------------------------------
    def columns(self, question: TableQuestion) -> TableAnswers:
        """Return the answers of the attached devices about their tables; newly attached devices are asked."""
        if self._tables is None or self._tables.question != question:
            about = settings_of_cloud(question.settings).columns.model_dump()
            self._note(AuditLine("", 0, "columns", "in", self.peer, about=about))
            self._tables = TableInquiry(self.link, question, self.audit, seconds=_DEVICE_SHARE * TABLE_SECONDS)
        self._tables.ask(self._suspended())
        answers, refused = dict[str, TableAnswer](), dict(self._tables.refused)
        for name, answer in self._tables.answers.items():
            try:
                self.allow.check_statistics(answer.columns)
                answers[name] = answer
            except CoterieError as e:
                refused[name] = str(e)
        sizes = {name: len(codec.pack(answer)) for name, answer in answers.items()}
        self._note(AuditLine("", 0, "columns", "out", self.peer, {"columns": sum(sizes.values())}, sizes))
        return TableAnswers(answers, refused)

    # ---- hello and over ----------------------------------------------------------------------------------------------
    def hello(self, text: str) -> Attached:
        """Return the hellos of the attached devices that have come. Send the plan to new devices without waiting."""
        if self._run is None or self._run.dispatcher.plan != text:
            self._run = self._begin(text)
        run, connected = self._run, set(self.link.nodes())
        suspended = self._suspended()
        nodes = connected - suspended
        for name in run.refused.keys() - nodes:
            del run.refused[name]
        run.greeting.forget_absent(connected)
        values, failures = run.greeting.ask(nodes - run.hellos.keys() - run.refused.keys())
        refused = {n: f.why.removeprefix(f"{n}: ") for n, f in failures.items() if not f.passing}
        for name, value in values.items():
            try:
                run.hellos[name] = read_hello(value)
            except CoterieError as e:
                refused[name] = str(e)
        run.refused.update(refused)
        for name, reason in refused.items():
            if run.dispatcher.line_budget.take(name):
                run.dispatcher.note_refused_hello(name, reason)
        excluded = {**run.refused, **dict.fromkeys(sorted(suspended & connected), SUSPENDED)}
        return Attached({n: run.hellos[n] for n in sorted(nodes & run.hellos.keys())}, excluded)

    def _begin(self, text: str) -> EdgeRun:
        """Start the run of a plan that is new to this edge, or that it has refused before."""
        run_id = ""
        try:
            plan = FederationPlan.read(text)
            run_id = plan.run
            if plan.settings.get("secure") is not None:
                raise CoterieError("this run has secure sums, and devices behind an edge cannot take part in them")
            method = plan.session(None, None, None, self.allow).method
        except CoterieError as e:
            if self._refusal != run_id + str(e):
                self._note(AuditLine(run_id, 0, "hello", "out", self.peer, refused=str(e)))
            self._refusal = run_id + str(e)
            raise
        self._refusal = ""
        self._note(AuditLine(run_id, 0, "hello", "in", self.peer, about=plan.summary))
        log.info("run %s: %s", run_id[:8], method.card.title)
        dispatcher = Dispatcher(self.link, text, run_id, method, self.audit)
        return EdgeRun(plan, method, dispatcher, Greeting(dispatcher))

    def over(self, message: RunOver) -> RunOver:
        """Tell the devices that the run has ended, as the cloud says."""
        run = self._current(message.run)
        greeted = set(self.link.nodes()) & run.hellos.keys()
        run.dispatcher.send_over(greeted, message.rounds, OVER_SECONDS / 2)
        log.info("run %s has ended after %s rounds", message.run[:8], message.rounds)
        if not self.stay:
            self.ended()
        return message

    def _current(self, run_id: str) -> EdgeRun:
        """Return the current run; raises NoPlanError if it is not the one of the message."""
        if self._run is None or self._run.plan.run != run_id:
            raise NoPlanError
        return self._run

    def _note(self, *lines: AuditLine) -> None:
        if self.audit is not None:
            self.audit.write(*lines)

    def _suspended(self) -> set[str]:
        return {name for name, role in self.roles().items() if role.suspended}

    # ---- jobs --------------------------------------------------------------------------------------------------------
    def answer(self, kind: JobKind, round: int, job: EdgeJob) -> EdgeAnswer:
        """Have the devices answer their requests, and merge the uploads of the clusters in the job."""
        run = self._current(job.run)
        self._note(AuditLine(job.run, round, kind, "in", self.peer, of_job(run.method, job)))
        asked = [r.client for r in job.requests] + [r.client for task in job.merges for r in task.requests]
        if not set(asked) <= job.names.keys() & job.base.keys():
            raise CoterieError("the job does not name all devices that it asks")
        requests: list[Request] = []
        missing: dict[ClientId, str] = {}
        for r in job.requests:
            try:
                check_request(run.method, r, round)
                requests.append(r)
            except CoterieError as e:
                missing[r.client] = str(e)
        stage = EdgeStage(run.method)
        for task in job.merges:
            check_task(run.method, task, job.names)
            stage.relay(task)
        until = time.monotonic() + _DEVICE_SHARE * job.deadline
        first = _TRAIN_SHARE if job.merges and announces(run.method) else 1.0
        gathered = self._ask(run, kind, round, job, [*requests, *stage.requests], first * _DEVICE_SHARE * job.deadline)
        trained = {i: a for i, a in gathered.answers.items() if isinstance(a, TrainAnswer)}
        # the cloud judges the uploads that are only passed on
        judged = judge_answers(stage.requests, trained, job.norm_bound, run.usual)
        downloads = {r.client: r.download for r in stage.requests}

        def send(clients: Sequence[ClientId]) -> dict[ClientId, Tree]:
            nonlocal judged
            left = max(1.0, until - time.monotonic())
            more = self._ask(run, "send", round, job, [SendRequest(i, round) for i in clients], left)
            rest = {i: a.upload for i, a in more.answers.items() if isinstance(a, SendAnswer)}
            sizes = judge_uploads({i: downloads[i] for i in rest}, rest, job.norm_bound, run.usual)
            judged |= sizes
            gathered.missing |= more.missing
            gathered.refused |= more.refused
            gathered.wire = _sum([gathered.wire, more.wire])
            return {i: tree for i, tree in rest.items() if i not in sizes.refused}

        first_refused = {**gathered.refused, **judged.refused}
        merged = stage.merge({i: a for i, a in trained.items() if i not in first_refused}, send)
        refused = {**gathered.refused, **judged.refused}
        if usual := judged.usual(i for m in merged.values() for i in m.senders):
            run.usual.add(round, usual)
        missing |= {**gathered.missing, **stage.missing}
        merged_here = {r.client for r in stage.requests}
        answers = tuple(
            replace(a, upload={}) if i in merged_here and isinstance(a, TrainAnswer) else a
            for i, a in sorted(gathered.answers.items())
            if i not in refused and i not in missing
        )
        reply = EdgeAnswer(answers, missing, tuple(merged.values()), gathered.wire, refused)
        self._note(
            *(
                excluded_line(job.run, round, kind, job.names[i], why, absent=i not in refused)
                for i, why in sorted({**missing, **refused}.items())
            ),
            AuditLine(job.run, round, kind, "out", self.peer, of_reply(run.method, reply)),
        )
        return reply

    def _ask(
        self, run: EdgeRun, kind: JobKind, round: int, job: EdgeJob, requests: Sequence[Request], seconds: float
    ) -> Gathered:
        """Send all requests to their devices at once, and check the answers."""
        suspended, gathered = self._suspended(), Gathered()
        jobs = {
            job.names[r.client]: DeviceJob(job.run, job.base[r.client], r)
            for r in requests
            if job.names[r.client] not in suspended
        }
        largest = largest_message(run.method, ["up"])
        replies = run.dispatcher.send_jobs(jobs, kind, round, seconds, largest)
        gathered.wire = _sum(replies.traffic.values())
        for r in requests:
            name = job.names[r.client]
            if name in suspended:
                gathered.missing[r.client] = SUSPENDED
                continue
            if (failure := replies.failures.get(name)) is not None:
                reasons = gathered.refused if failure.cause is Cause.WRONG else gathered.missing
                reasons[r.client] = failure.why.removeprefix(f"{name}: ")
                continue
            try:
                samples = run.hellos[name].samples_in(r.data_round) if name in run.hellos else 0
                gathered.answers[r.client] = check_answer(replies.values[name], r, samples, run.method.ctx.task)
            except CoterieError as e:
                gathered.refused[r.client] = str(e)
                if isinstance(e, SamplesError):
                    run.hellos.pop(name, None)  # its data may have changed: it gets another hello
        return gathered


def _sum(traffic: Iterable[WireBytes]) -> WireBytes:
    counts = [(t.payload_down, t.payload_up, t.total_down, t.total_up) for t in traffic]
    return WireBytes(*map(sum, zip(*counts, strict=True))) if counts else WireBytes()


def run_edge(
    up: str,
    ca: Path,
    key: Path,
    host: str,
    port: int,
    certs: Path,
    state: Path,
    allow: Allow,
    stay: bool = False,
    certificate: Path | None = None,
) -> None:
    """Be an edge until the run has ended, or until SIGTERM or Ctrl-C."""
    with listening(Certs(certs), host, port) as link:
        handler = EdgeHandler(link, allow, AuditLog(state / AUDIT_FILE), up, stay, roles=Certs(certs).roles)
        node = Node(up, ca, key, handler.handle, certificate=certificate)
        handler.ended = node.leave
        node.stop_on_signals().run()
