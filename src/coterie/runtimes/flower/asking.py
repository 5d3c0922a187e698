"""Asking the nodes of one SuperLink about one run: hello first, then jobs. The same in the cloud and in an edge."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from coterie import codec
from coterie.codec import Value
from coterie.errors import CoterieError
from coterie.method import Method
from coterie.runtimes.flower.audit import AuditLog, Line
from coterie.runtimes.flower.contents import of_job, of_reply
from coterie.runtimes.flower.device import NO_PLAN
from coterie.runtimes.flower.messages import Attached, Hello, Job, Kind, PlanText, RunOver, WireBytes, split
from coterie.runtimes.flower.roster import ATTACHED_BYTES, HELLO_BYTES
from coterie.runtimes.flower.transport import Buffer, Replies

OVER = 10.0  # seconds to hear that a run has ended
HELLO = 120.0  # seconds to load data and build a model
Answers = tuple[dict[str, Value], dict[str, str]]  # what was answered, and why others did not, by name of the node


class Link(Protocol):
    """What is needed of the transport (a FlowerLink)."""

    looked: Callable[[Collection[str], Collection[str]], None]  # told while it waits: who is connected, whom it asks

    def nodes(self) -> list[str]: ...

    def send(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = ...,
    ) -> Replies: ...  # fmt: skip


class Asking:
    def __init__(self, link: Link, plan: str, run: str, method: Method, audit: AuditLog | None = None):
        self.link, self.plan, self.run, self.method, self.audit = link, plan, run, method, audit
        self.traffic: list[tuple[str, WireBytes]] = []  # of the jobs since somebody took them, by node
        self._heard: dict[str, Value] = {}  # the newest hello of every node; the same again is no news

    def hello(self, nodes: Iterable[str], largest: int = HELLO_BYTES) -> Answers:
        asked = dict.fromkeys(sorted(nodes), codec.pack(PlanText(self.plan)))
        found, errors = _read(self.link.send(asked, "hello", 0, HELLO, None, largest)) if asked else ({}, {})
        for name, said in found.items():
            if self._heard.get(name) != said:
                self._note(Line(self.run, 0, "hello", "in", name, about=_said(said)))
                self._heard[name] = said
        return found, errors

    def _note(self, *lines: Line) -> None:
        if self.audit is not None:
            self.audit.write(*lines)

    def over(self, nodes: Iterable[str], run: str, rounds: int) -> dict[str, str]:
        """Tell them that the run has ended; who could not be told, and why."""
        asked = dict.fromkeys(sorted(nodes), codec.pack(RunOver(run, rounds)))
        return _read(self.link.send(asked, "over", rounds, OVER, None, HELLO_BYTES))[1] if asked else {}

    def jobs(self, jobs: Mapping[str, Job], kind: Kind, round: int, deadline: float, largest: int) -> Answers:
        """One exchange with all of them; a node that lost the plan is told again and asked again."""
        if not jobs:
            return {}, {}
        until = time.monotonic() + deadline
        common, rest = split(jobs)
        shared, own = codec.pack(common), {name: codec.pack(job) for name, job in rest.items()}

        def ask(nodes: Iterable[str], seconds: float) -> Answers:
            asked = {n: own[n] for n in nodes}
            self._note(*(Line(self.run, round, kind, "out", n, of_job(self.method, jobs[n])) for n in asked))
            found = self.link.send(asked, kind, round, seconds, shared, largest)
            self.traffic += [(name, WireBytes(**vars(taken))) for name, taken in found.traffic.items()]
            replies, errors = _read(found)
            came = (Line(self.run, round, kind, "in", n, of_reply(self.method, reply)) for n, reply in replies.items())
            self._note(*came)
            return replies, errors

        replies, errors = ask(jobs, deadline)
        forgot = [n for n, e in errors.items() if NO_PLAN in e]
        if forgot:
            _, lost = self.hello(forgot, ATTACHED_BYTES)
            again = [n for n in forgot if n not in lost]
            more, failed = ask(again, max(1.0, until - time.monotonic())) if again else ({}, {})
            replies |= more
            errors = {n: e for n, e in {**errors, **lost, **failed}.items() if n not in replies}
        return replies, errors


def _read(replies: Replies) -> Answers:
    found, errors = {}, dict(replies.errors)
    for name, answer in replies.answers.items():
        try:
            found[name] = codec.unpack(answer)
        except CoterieError as e:
            errors[name] = f"{name}: {e}"
    return found, errors


def _said(hello: Value) -> dict[str, object]:
    """What a hello says, for the audit log."""
    if isinstance(hello, Hello):
        return {"client": hello.client, "samples": hello.samples}
    return {"devices": sorted(map(str, hello.devices))} if isinstance(hello, Attached) else {}


def passing(reason: str) -> bool:
    """Will it be otherwise soon?"""
    return "did not answer" in reason or "is not connected" in reason


def lost(run: str, round: int, message: str, name: str, why: str) -> Line:
    """Of an answer that did not come or was refused, for the audit log."""
    if passing(why):
        return Line(run, round, message, "in", name, missing=why)
    return Line(run, round, message, "in", name, refused=why)
