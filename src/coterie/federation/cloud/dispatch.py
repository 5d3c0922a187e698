"""Sends the messages of one run to nodes and reads their replies.

The cloud uses it for its nodes, and an edge for its devices. A node gets the plan of the run (a hello), then jobs.
"""

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from coterie.core.method import Method
from coterie.engine import codec
from coterie.engine.codec import Value
from coterie.engine.messages import check_message
from coterie.errors import CoterieError, sentence
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
from coterie.federation.transport import Buffer, Cause, Exchange, Failure, NodeLink, NodeReplies

OVER_SECONDS = 10.0  # time for the message that a run has ended; an edge gives its devices half of it
_HELLO_SECONDS = 120.0  # time for a device to load its data and build the model; rounds do not wait for it
_EDGE_HELLO_SECONDS = 10.0  # time for the hello of an edge, which loads nothing
_LONGEST_SILENCE = 1800.0  # seconds after which a node that never answers is asked again, at most
HELLO_LINES, _HELLO_LINES_SECONDS = 100, 600.0  # log lines about hellos that one node may cause in this time
NAMES_SHOWN = 100  # names of devices in the audit line about the hello of an edge
log = logging.getLogger("coterie.cloud")


class Hellos(NamedTuple):
    """Hellos by name of the node, and why other nodes gave none."""

    values: dict[str, Value]
    failures: dict[str, Failure]


class JobReplies(NamedTuple):
    """NodeReplies to jobs by name of the node, why other nodes gave none, and the bytes that the jobs took."""

    values: dict[str, Value]
    failures: dict[str, Failure]
    traffic: dict[str, WireBytes]


class Dispatcher:
    """Talks to the nodes of one link about one run."""

    def __init__(self, link: NodeLink, plan: str, run: str, method: Method, audit: AuditLog | None = None):
        self.link, self.plan, self.run, self.method, self.audit = link, plan, run, method, audit
        self.line_budget = LineBudget()
        self._last_hellos: dict[str, Value] = {}  # newest hello of every node; only a different one is noted
        self._late_edges: set[str] = set()  # edges that did not answer a hello in time
        self._late_greeting = Greeting(self, MAX_ATTACHED_BYTES)

    # ---- hellos ------------------------------------------------------------------------------------------------------
    def greet_edges(self, edges: Iterable[str]) -> Hellos:
        """Send the plan to edges and wait for their hellos.

        An edge that did not answer in time is asked again without waiting, until it answers or was disconnected.
        """
        edges = set(edges)
        self._late_edges &= edges
        self._late_greeting.forget_absent(edges)
        values, failures = self._late_greeting.ask(self._late_edges)
        self._late_edges -= values.keys()
        messages = dict.fromkeys(sorted(edges - self._late_edges - values.keys()), self.hello)
        if messages:
            new = self.read_hellos(self.link.send(messages, "hello", 0, _EDGE_HELLO_SECONDS, None, MAX_ATTACHED_BYTES))
            self._late_edges |= {n for n, failure in new.failures.items() if failure.cause is Cause.LATE}
            values, failures = {**values, **new.values}, {**failures, **new.failures}
        return Hellos(values, failures)

    def read_hellos(self, replies: NodeReplies) -> Hellos:
        """Return the hellos among replies; every other reply is a failure. New hellos are noted in the audit log."""
        came, failures = _unpack(replies)
        values: dict[str, Value] = {}
        for name, value in came.items():
            try:
                values[name] = check_message(value, Attached if isinstance(value, Attached) else Hello)
            except CoterieError as e:
                failures[name] = Failure(Cause.WRONG, f"{name}: {e}")
                continue
            if self._last_hellos.get(name) != value:
                if self.line_budget.take(name):
                    self._note(AuditLine(self.run, 0, "hello", "in", name, about=_hello_summary(value)))
                self._last_hellos[name] = value
        return Hellos(values, failures)

    def note_refused_hello(self, name: str, reason: str) -> None:
        """Write to the audit log that the hello of a node was refused."""
        self._note(AuditLine(self.run, 0, "hello", "in", name, refused=reason))

    @property
    def hello(self) -> Buffer:
        return codec.pack(PlanText(self.plan))

    def _note(self, *lines: AuditLine) -> None:
        if self.audit is not None:
            self.audit.write(*lines)

    # ---- jobs --------------------------------------------------------------------------------------------------------
    def send_jobs(
        self, jobs: Mapping[str, NodeJob], kind: JobKind, round: int, deadline: float, largest: int
    ) -> JobReplies:
        """Send each node its job and wait for the replies.

        A node that has lost the plan gets it again, and its job after that, within the same deadline.
        """
        if not jobs:
            return JobReplies({}, {}, {})
        until = time.monotonic() + deadline
        common, rest = split_common(jobs)
        shared, own = codec.pack(common), {name: codec.pack(job) for name, job in rest.items()}

        def send(nodes: Iterable[str], seconds: float) -> JobReplies:
            messages = {n: own[n] for n in nodes}
            self._note(*(AuditLine(self.run, round, kind, "out", n, of_job(self.method, jobs[n])) for n in messages))
            replies = self.link.send(messages, kind, round, seconds, shared, largest)
            values, failures = _unpack(replies)
            self._note(
                *(AuditLine(self.run, round, kind, "in", n, of_reply(self.method, v)) for n, v in values.items())
            )
            return JobReplies(values, failures, {n: WireBytes(**vars(taken)) for n, taken in replies.traffic.items()})

        first = send(jobs, deadline)
        without_plan = [n for n, failure in first.failures.items() if failure.cause is Cause.NO_PLAN]
        if not without_plan:
            return first
        left = max(1.0, until - time.monotonic())
        greeted = self.link.send(dict.fromkeys(without_plan, self.hello), "hello", 0, left, None, MAX_ATTACHED_BYTES)
        again = [n for n in without_plan if n not in greeted.errors]
        second = send(again, max(1.0, until - time.monotonic())) if again else JobReplies({}, {}, {})
        values = {**first.values, **second.values}
        failures = {**first.failures, **greeted.errors, **second.failures}
        return JobReplies(
            values, {n: f for n, f in failures.items() if n not in values}, {**first.traffic, **second.traffic}
        )

    def send_over(self, nodes: Iterable[str], rounds: int, seconds: float = OVER_SECONDS) -> dict[str, Failure]:
        """Tell nodes that the run has ended; return the nodes that could not be told, with the reason."""
        messages = dict.fromkeys(sorted(nodes), codec.pack(RunOver(self.run, rounds)))
        if not messages:
            return {}
        return _unpack(self.link.send(messages, "over", rounds, seconds, None, MAX_HELLO_BYTES))[1]


class LineBudget:
    """Limits the log lines that a node can cause by its hellos, so that it cannot fill a disk."""

    def __init__(self, most: int = HELLO_LINES, seconds: float = _HELLO_LINES_SECONDS):
        self.most, self.seconds = most, seconds
        self._used: dict[str, tuple[float, int]] = {}  # start of the interval and lines since then, by node

    def take(self, name: str) -> bool:
        """Return True if one more line about the node, or about a device behind it, may be written."""
        node, now = name.partition("/")[0], time.monotonic()
        since, lines = self._used.get(node, (now, 0))
        if now - since >= self.seconds:
            since, lines = now, 0
        self._used[node] = since, lines + 1
        if lines == self.most:
            log.warning("%s: its hellos are not logged for the next %.0f s", node, self.seconds - (now - since))
        return lines < self.most


class Greeting:
    """Sends the plan to nodes and collects their hellos whenever they come, without waiting for them."""

    def __init__(self, dispatcher: Dispatcher, largest: int = MAX_HELLO_BYTES):
        self.dispatcher, self.largest = dispatcher, largest
        self._open: list[tuple[float, Exchange]] = []  # exchanges that are not complete, with their start times
        self._ask_after: dict[str, float] = {}  # time after which a node that did not answer is asked again
        self._pause: dict[str, float] = {}  # seconds until then; doubled every time

    def ask(self, nodes: Iterable[str]) -> Hellos:
        """Send the plan to nodes whose hello is not awaited yet; return the hellos that came since the last call."""
        now, waiting = time.monotonic(), self.waiting()
        new = {n for n in nodes if n not in waiting and now >= self._ask_after.get(n, now)}
        if new:
            messages = dict.fromkeys(sorted(new), self.dispatcher.hello)
            begun = self.dispatcher.link.begin(messages, "hello", 0, _HELLO_SECONDS, None, self.largest)
            self._open.append((now, begun))
        values: dict[str, Value] = {}
        failures: dict[str, Failure] = {}
        for _, exchange in self._open:
            came = self.dispatcher.read_hellos(exchange.poll())
            values |= came.values
            failures |= came.failures
        self._open = [(since, exchange) for since, exchange in self._open if exchange.waiting]
        for name in values:
            self._pause.pop(name, None)
        for name, failure in failures.items():
            if failure.cause is Cause.LATE:
                pause = min(_LONGEST_SILENCE, 2 * self._pause.get(name, _HELLO_SECONDS / 2))
                self._pause[name], self._ask_after[name] = pause, now + pause
        return Hellos(values, failures)

    def forget_absent(self, connected: Collection[str]) -> None:
        """Let nodes that are not connected be asked at once when they are back."""
        self._ask_after = {n: until for n, until in self._ask_after.items() if n in connected}

    def waiting(self, recent: float = float("inf")) -> set[str]:
        """Return the nodes that were asked in the last `recent` seconds and have not answered yet."""
        now = time.monotonic()
        return {n for since, exchange in self._open if now - since < recent for n in exchange.waiting}


def _unpack(replies: NodeReplies) -> tuple[dict[str, Value], dict[str, Failure]]:
    values, failures = {}, dict(replies.errors)
    for name, answer in replies.answers.items():
        try:
            values[name] = codec.unpack_foreign(answer)
        except CoterieError as e:
            failures[name] = Failure(Cause.WRONG, f"{name}: {e}")
    return values, failures


def _hello_summary(hello: Value) -> dict[str, object]:
    """Return the content of a hello for the audit log."""
    if isinstance(hello, Hello):
        return {"client": hello.client, "samples": hello.samples}
    if not isinstance(hello, Attached):
        return {}
    names = sorted(hello.devices)
    more = {"more": len(names) - NAMES_SHOWN} if len(names) > NAMES_SHOWN else {}
    return {"devices": [sentence(n, 63) for n in names[:NAMES_SHOWN]], **more}


def excluded_line(run: str, round: int, message: str, name: str, why: str, absent: bool) -> AuditLine:
    """Return the audit line of an answer that did not come (`absent`) or was refused."""
    if absent:
        return AuditLine(run, round, message, "in", name, missing=why)
    return AuditLine(run, round, message, "in", name, refused=why)
