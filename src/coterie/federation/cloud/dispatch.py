"""Dispatcher the nodes of one SuperLink about one run: hello first, then jobs. The same in the cloud and in an edge."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from coterie.core.method import Method
from coterie.engine import codec
from coterie.engine.codec import Value
from coterie.engine.messages import check
from coterie.errors import CoterieError, sentence
from coterie.federation.device import NO_PLAN
from coterie.federation.identity.seats import MAX_ATTACHED_BYTES, MAX_HELLO_BYTES
from coterie.federation.payload_kinds import of_job, of_reply
from coterie.federation.policy.audit import AuditLine, AuditLog
from coterie.federation.protocol.messages import (
    Attached,
    Hello,
    JobKind,
    NodeJob,
    PlanText,
    RunOver,
    WireBytes,
    split_common,
)
from coterie.federation.transport import Buffer, Cause, Failure, NodeReplies

OVER = 10.0  # seconds to hear that a run has ended; an edge, which passes it on, gives its devices half of that
HELLO = 120.0  # seconds to load data and build a model; nobody else waits for it
EDGE_HELLO = 10.0  # seconds for an edge's, which only has to look
TOLD, TOLD_IN = 100, 600.0  # lines about hellos of one node in so many seconds: no node fills a disk with them
SHOWN = 100  # names of devices in the line about the hello of an edge
MUTE_MOST = 1800.0  # seconds after which a node that never answers is asked again, at most
log = logging.getLogger("coterie.cloud")
Answers = tuple[dict[str, Value], dict[str, Failure]]  # what was answered, and why others did not, by name of the node


class Exchange(Protocol):
    """Messages on their way."""

    @property
    def waiting(self) -> set[str]: ...  # who has neither answered nor been given up

    def poll(self) -> NodeReplies: ...  # what is new; waits for nobody


class Link(Protocol):
    """What is needed of the transport (a FlowerLink)."""

    looked: Callable[[Collection[str], Collection[str]], None]  # told while it waits: who is connected, whom it asks

    def nodes(self) -> list[str]: ...

    def begin(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = ...,
    ) -> Exchange: ...  # fmt: skip

    def send(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = ...,
    ) -> NodeReplies: ...  # fmt: skip


class Dispatcher:
    def __init__(self, link: Link, plan: str, run: str, method: Method, audit: AuditLog | None = None):
        self.link, self.plan, self.run, self.method, self.audit = link, plan, run, method, audit
        self.traffic: list[tuple[str, WireBytes]] = []  # of the jobs since somebody took them, by node
        self.spare = Spare()
        self._heard: dict[str, Value] = {}  # the newest hello of every node; the same again is no news
        self._silent: set[str] = set()  # edges that did not answer in time,
        self._late = Greeting(self, MAX_ATTACHED_BYTES)  # and may take as long as they like

    def greet(self, nodes: Iterable[str], largest: int = MAX_HELLO_BYTES) -> Exchange:
        """Tell nodes the plan, without waiting for their hellos."""
        return self.link.begin(dict.fromkeys(sorted(nodes), self._hello), "hello", 0, HELLO, None, largest)

    def edges(self, nodes: Iterable[str]) -> Answers:
        """The hellos of edges, which wait for nobody themselves. One that did not answer is asked again without waiting
        for it, until it does or was gone meanwhile.
        """
        nodes = set(nodes)
        self._silent &= nodes
        self._late.gone(nodes)
        found, errors = self._late.ask(self._silent)
        self._silent -= found.keys()
        asked = dict.fromkeys(sorted(nodes - self._silent - found.keys()), self._hello)
        if asked:
            now, failed = self.heard(self.link.send(asked, "hello", 0, EDGE_HELLO, None, MAX_ATTACHED_BYTES))
            self._silent |= {n for n, why in failed.items() if why.cause is Cause.LATE}
            found, errors = {**found, **now}, {**errors, **failed}
        return found, errors

    def heard(self, replies: NodeReplies) -> Answers:
        """Hellos that have come, noted if they are news; anything else that came is an error."""
        came, errors = _read(replies)
        found: dict[str, Value] = {}
        for name, said in came.items():
            try:
                found[name] = check(said, Attached if isinstance(said, Attached) else Hello)
            except CoterieError as e:
                errors[name] = Failure(Cause.WRONG, f"{name}: {e}")
                continue
            if self._heard.get(name) != said:
                if self.spare.allows(name):
                    self._note(AuditLine(self.run, 0, "hello", "in", name, about=_said(said)))
                self._heard[name] = said
        return found, errors

    @property
    def _hello(self) -> Buffer:
        return codec.pack(PlanText(self.plan))

    def _note(self, *lines: AuditLine) -> None:
        if self.audit is not None:
            self.audit.write(*lines)

    def over(self, nodes: Iterable[str], run: str, rounds: int, seconds: float = OVER) -> dict[str, Failure]:
        """Tell them that the run has ended; who could not be told, and why."""
        asked = dict.fromkeys(sorted(nodes), codec.pack(RunOver(run, rounds)))
        return _read(self.link.send(asked, "over", rounds, seconds, None, MAX_HELLO_BYTES))[1] if asked else {}

    def jobs(self, jobs: Mapping[str, NodeJob], kind: JobKind, round: int, deadline: float, largest: int) -> Answers:
        """One exchange with all of them; a node that lost the plan is told again and asked again."""
        if not jobs:
            return {}, {}
        until = time.monotonic() + deadline
        common, rest = split_common(jobs)
        shared, own = codec.pack(common), {name: codec.pack(job) for name, job in rest.items()}

        def ask(nodes: Iterable[str], seconds: float) -> Answers:
            asked = {n: own[n] for n in nodes}
            self._note(*(AuditLine(self.run, round, kind, "out", n, of_job(self.method, jobs[n])) for n in asked))
            found = self.link.send(asked, kind, round, seconds, shared, largest)
            self.traffic += [(name, WireBytes(**vars(taken))) for name, taken in found.traffic.items()]
            replies, errors = _read(found)
            came = (
                AuditLine(self.run, round, kind, "in", n, of_reply(self.method, reply)) for n, reply in replies.items()
            )
            self._note(*came)
            return replies, errors

        replies, errors = ask(jobs, deadline)
        forgot = [n for n, e in errors.items() if NO_PLAN in e.why]
        if forgot:
            left = max(1.0, until - time.monotonic())
            told = self.link.send(dict.fromkeys(forgot, self._hello), "hello", 0, left, None, MAX_ATTACHED_BYTES)
            lost = told.errors
            again = [n for n in forgot if n not in lost]
            more, failed = ask(again, max(1.0, until - time.monotonic())) if again else ({}, {})
            replies |= more
            errors = {n: e for n, e in {**errors, **lost, **failed}.items() if n not in replies}
        return replies, errors


class Spare:
    """How many more lines a node may cause in the logs by what it says when it is asked who it is."""

    def __init__(self, most: int = TOLD, seconds: float = TOLD_IN):
        self.most, self.seconds = most, seconds
        self._since: dict[str, tuple[float, int]] = {}  # by node of this server

    def allows(self, name: str) -> bool:
        node, now = name.partition("/")[0], time.monotonic()
        since, told = self._since.get(node, (now, 0))
        if now - since >= self.seconds:
            since, told = now, 0
        self._since[node] = since, told + 1
        if told == self.most:
            log.warning("%s: its hellos are not noted any more for %.0f s", node, self.seconds - (now - since))
        return told < self.most


class Greeting:
    """Hellos that are asked for once and answered whenever the node likes: nobody waits for a node without a seat."""

    def __init__(self, asking: Dispatcher, largest: int = MAX_HELLO_BYTES):
        self.asking, self.largest = asking, largest
        self._open: list[tuple[float, Exchange]] = []  # since when
        self._again: dict[str, float] = {}  # when a node that did not answer is asked again
        self._pause: dict[str, float] = {}  # seconds from then on until the next time

    def ask(self, nodes: Iterable[str]) -> Answers:
        """Ask those whose answer is not on its way, and return what has come since the last time."""
        now, waiting = time.monotonic(), self.waiting()
        new = {n for n in nodes if n not in waiting and now >= self._again.get(n, now)}
        if new:
            self._open.append((now, self.asking.greet(new, self.largest)))
        replies: dict[str, Value] = {}
        errors: dict[str, Failure] = {}
        for _, exchange in self._open:
            found, lacking = self.asking.heard(exchange.poll())
            replies |= found
            errors |= lacking
        self._open = [(since, x) for since, x in self._open if x.waiting]
        for name in replies:
            self._pause.pop(name, None)
        for name, failed in errors.items():
            if failed.cause is Cause.LATE:
                pause = self._pause[name] = min(MUTE_MOST, 2 * self._pause.get(name, HELLO / 2))
                self._again[name] = now + pause
        return replies, errors

    def gone(self, connected: Collection[str]) -> None:
        """Who is not connected any more is asked at once when it is back."""
        self._again = {n: until for n, until in self._again.items() if n in connected}

    def waiting(self, recent: float = float("inf")) -> set[str]:
        """Who has not answered yet, of those asked in the last `recent` seconds."""
        now = time.monotonic()
        return {n for since, x in self._open if now - since < recent for n in x.waiting}


def _read(replies: NodeReplies) -> Answers:
    found, errors = {}, dict(replies.errors)
    for name, answer in replies.answers.items():
        try:
            found[name] = codec.unpack_foreign(answer)
        except CoterieError as e:
            errors[name] = Failure(Cause.WRONG, f"{name}: {e}")
    return found, errors


def _said(hello: Value) -> dict[str, object]:
    """What a hello says, for the audit log."""
    if isinstance(hello, Hello):
        return {"client": hello.client, "samples": hello.samples}
    if not isinstance(hello, Attached):
        return {}
    names = sorted(hello.devices)
    more = {"more": len(names) - SHOWN} if len(names) > SHOWN else {}
    return {"devices": [sentence(n, 63) for n in names[:SHOWN]], **more}


def lost(run: str, round: int, message: str, name: str, why: str, passing: bool) -> AuditLine:
    """Of an answer that did not come or was refused, for the audit log."""
    if passing:
        return AuditLine(run, round, message, "in", name, missing=why)
    return AuditLine(run, round, message, "in", name, refused=why)
