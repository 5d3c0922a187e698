"""An edge: a node to the cloud and a server to its own devices. It keeps nothing between rounds.

Devices say hello through it, jobs go through it, and what the method's edges do (relay, merge) is done here for the
clusters whose participants are all attached here. The state of those edges comes with the job and goes back with the
answer, so an edge that dies loses nothing.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

from coterie.core.method import ClientId, Method
from coterie.engine import codec
from coterie.engine.messages import TrainAnswer, check
from coterie.errors import CoterieError
from coterie.federation.cloud.dispatch import OVER, Dispatcher, Greeting, Link, lost
from coterie.federation.cloud.upload_bounds import UsualSizes, judge
from coterie.federation.device import NO_PLAN
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
    WireBytes,
    with_common,
)
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.transport import Cause, listening
from coterie.federation.transport.node import Node
from coterie.federation.validation import SamplesError, check_answer, check_request, check_task, room

PATIENCE = 0.85  # of the cloud's deadline that devices have; the rest is for the way up
log = logging.getLogger("coterie.edge")


@dataclass(frozen=True)
class Current:
    """The run an edge is in, and who of its devices is in it too."""

    plan: FederationPlan
    method: Method
    asking: Dispatcher
    greeting: Greeting
    hellos: dict[str, Hello] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    memory: UsualSizes = field(default_factory=UsualSizes)  # how large uploads usually are


@dataclass
class EdgeHandler:
    """Answers the cloud by asking the devices of the SuperLink below."""

    link: Link
    allow: Allow = field(default_factory=Allow)
    audit: AuditLog | None = None
    peer: str = "cloud"
    stay: bool = False  # wait for the next run when one has ended
    ended: Callable[[], None] = lambda: None  # called when a run has ended and there is nothing to wait for
    roles: Callable[[], Mapping[str, NodeRole]] = dict  # of the edge's own nodes, as they are now
    _refused: str = ""  # why the latest plan was; it is offered again and again
    _current: Current | None = None

    def handle(self, kind: str, round: int, shared: memoryview | None, own: memoryview) -> memoryview:
        asked = codec.unpack_foreign(own)
        if kind == "hello":
            return codec.pack(self.hello(check(asked, PlanText).text))
        if kind == "over":
            return codec.pack(self.over(check(asked, RunOver)))
        common = Common() if shared is None else check(codec.unpack_foreign(shared), Common)
        job = with_common(common, check(asked, EdgeJob))
        if kind not in get_args(JobKind):
            raise CoterieError(f'an edge cannot answer "{kind}"')
        return codec.pack(self.answer(cast(JobKind, kind), round, job))

    def hello(self, text: str) -> Attached:
        """Who is attached here, with the hellos that have come; new devices get the plan, and nobody waits for them."""
        if self._current is None or self._current.asking.plan != text:
            self._current = self._begin(text)
        now, connected = self._current, set(self.link.nodes())
        suspended = self._suspended()
        nodes = connected - suspended
        for gone in now.refused.keys() - nodes:
            del now.refused[gone]
        now.greeting.gone(connected)
        replies, errors = now.greeting.ask(nodes - now.hellos.keys() - now.refused.keys())
        refused = {n: e.why.removeprefix(f"{n}: ") for n, e in errors.items() if not e.passing}
        for name, reply in replies.items():
            try:
                now.hellos[name] = read_hello(reply)
            except CoterieError as e:
                refused[name] = str(e)
        now.refused.update(refused)
        self._note(
            *(
                AuditLine(now.plan.run, 0, "hello", "in", n, refused=r)
                for n, r in refused.items()
                if now.asking.spare.allows(n)
            )
        )
        out = {**now.refused, **dict.fromkeys(sorted(suspended & connected), SUSPENDED)}
        return Attached({n: now.hellos[n] for n in sorted(nodes & now.hellos.keys())}, out)

    def _begin(self, text: str) -> Current:
        """A plan that this edge has not seen, or has refused before."""
        run = ""
        try:
            plan = FederationPlan.read(text)
            run = plan.run
            method = plan.session(None, None, None, self.allow).method
        except CoterieError as e:
            if self._refused != run + str(e):
                self._note(AuditLine(run, 0, "hello", "out", self.peer, refused=str(e)))
            self._refused = run + str(e)
            raise
        self._refused = ""
        self._note(AuditLine(run, 0, "hello", "in", self.peer, about=plan.summary))
        log.info("run %s: %s", run[:8], method.card.title)
        asking = Dispatcher(self.link, text, run, method, self.audit)
        return Current(plan, method, asking, Greeting(asking))

    def _note(self, *lines: AuditLine) -> None:
        if self.audit is not None:
            self.audit.write(*lines)

    def over(self, told: RunOver) -> RunOver:
        """The cloud says that the run has ended; the devices here are told."""
        now = self._current
        if now is None or now.plan.run != told.run:
            raise CoterieError(NO_PLAN)
        said_hello = set(self.link.nodes()) & now.hellos.keys()
        now.asking.over(said_hello, told.run, told.rounds, OVER / 2)
        log.info("run %s has ended after %s rounds", told.run[:8], told.rounds)
        if not self.stay:
            self.ended()
        return told

    def answer(self, kind: JobKind, round: int, job: EdgeJob) -> EdgeAnswer:
        now = self._current
        if now is None or now.plan.run != job.run:
            raise CoterieError(NO_PLAN)
        self._note(AuditLine(job.run, round, kind, "in", self.peer, of_job(now.method, job)))
        asked = [r.client for r in job.requests] + [r.client for task in job.merges for r in task.requests]
        if not set(asked) <= job.names.keys() & job.base.keys():
            raise CoterieError("the job does not name all devices that it asks")
        requests: list[Request] = []
        missing: dict[ClientId, str] = {}
        for r in job.requests:
            try:
                check_request(now.method, r, round)
                requests.append(r)
            except CoterieError as e:
                missing[r.client] = str(e)
        tier = EdgeStage(now.method)
        for task in job.merges:
            check_task(now.method, task, job.names)
            tier.relay(task)
        answers, silent, refused = self._ask(now, kind, round, job, [*requests, *tier.requests])
        trained = {i: a for i, a in answers.items() if isinstance(a, TrainAnswer)}
        judged = judge(tier.requests, trained, job.norm_bound, now.memory)  # the cloud sees the other uploads itself
        refused |= judged.refused
        answers = {i: a for i, a in answers.items() if i not in refused}
        merged = tier.merge({i: a for i, a in trained.items() if i not in refused})
        if usual := judged.usual(i for m in merged.values() for i in m.senders):
            now.memory.add(round, usual)
        missing |= {**silent, **tier.missing}
        held = {r.client for r in tier.requests}  # their uploads end here
        kept = tuple(
            replace(a, upload={}) if i in held and isinstance(a, TrainAnswer) else a
            for i, a in sorted(answers.items())
            if i not in missing
        )
        traffic, now.asking.traffic = now.asking.traffic, []
        made = EdgeAnswer(kept, missing, tuple(merged.values()), _total(traffic), refused)
        self._note(
            *(
                lost(job.run, round, kind, job.names[i], why, passing=i not in refused)
                for i, why in sorted({**missing, **refused}.items())
            )
        )
        self._note(AuditLine(job.run, round, kind, "out", self.peer, of_reply(now.method, made)))
        return made

    def _suspended(self) -> set[str]:
        return {name for name, role in self.roles().items() if role.suspended}

    def _ask(
        self, now: Current, kind: JobKind, round: int, job: EdgeJob, requests: Sequence[Request]
    ) -> tuple[dict[ClientId, Answer], dict[ClientId, str], dict[ClientId, str]]:
        """The answers of devices, all asked at once, why others gave none, and why those of others are refused."""
        suspended = self._suspended()
        jobs = {
            job.names[r.client]: DeviceJob(job.run, job.base[r.client], r)
            for r in requests
            if job.names[r.client] not in suspended
        }
        seconds, largest = PATIENCE * job.deadline, room(now.method, ["up"])
        replies, errors = now.asking.jobs(jobs, kind, round, seconds, largest)
        answers: dict[ClientId, Answer] = {}
        missing: dict[ClientId, str] = {}
        refused: dict[ClientId, str] = {}
        for r in requests:
            name = job.names[r.client]
            if name in suspended:
                missing[r.client] = SUSPENDED
                continue
            if (failed := errors.get(name)) is not None:
                wrong = failed.cause is Cause.WRONG
                (refused if wrong else missing)[r.client] = failed.why.removeprefix(f"{name}: ")
                continue
            try:
                known = now.hellos[name].samples if name in now.hellos else 0
                answers[r.client] = check_answer(replies[name], r, known, now.method.ctx.task)
            except CoterieError as e:
                refused[r.client] = str(e)
                if isinstance(e, SamplesError):
                    now.hellos.pop(name, None)  # it may have other data now, and says hello again
        return answers, missing, refused


def _total(traffic: Iterable[tuple[str, WireBytes]]) -> WireBytes:
    found = [(t.payload_down, t.payload_up, t.total_down, t.total_up) for _, t in traffic]
    return WireBytes(*map(sum, zip(*found, strict=True))) if found else WireBytes()


def bridge(
    up: str,
    ca: Path,
    key: Path,
    host: str,
    port: int,
    certs: Path,
    state: Path,
    allow: Allow,
    stay: bool = False,
) -> None:
    """Be an edge until the run has ended, or told to stop."""
    with listening(Certs(certs), host, port) as link:
        handler = EdgeHandler(link, allow, AuditLog(state / AUDIT_FILE), up, stay, roles=Certs(certs).roles)
        node = Node(up, ca, key, handler.handle)
        handler.ended = node.leave
        node.stop_on_signals().run()
