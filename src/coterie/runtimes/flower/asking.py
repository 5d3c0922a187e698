"""Asking the nodes of one SuperLink about one run: hello first, then jobs. The same in the cloud and in an edge."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from coterie import codec
from coterie.codec import Value
from coterie.errors import CoterieError
from coterie.runtimes.flower.device import NO_PLAN
from coterie.runtimes.flower.messages import Job, Kind, PlanText, WireBytes, split
from coterie.runtimes.flower.roster import ATTACHED_BYTES, HELLO_BYTES
from coterie.runtimes.flower.transport import Buffer, Replies

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
    def __init__(self, link: Link, plan: str):
        self.link, self.plan = link, plan
        self.traffic: list[tuple[str, WireBytes]] = []  # of the jobs since somebody took them, by node

    def hello(self, nodes: Iterable[str], largest: int = HELLO_BYTES) -> Answers:
        asked = dict.fromkeys(sorted(nodes), codec.pack(PlanText(self.plan)))
        return _read(self.link.send(asked, "hello", 0, HELLO, None, largest)) if asked else ({}, {})

    def jobs(self, jobs: Mapping[str, Job], kind: Kind, round: int, deadline: float, largest: int) -> Answers:
        """One exchange with all of them; a node that lost the plan is told again and asked again."""
        if not jobs:
            return {}, {}
        until = time.monotonic() + deadline
        common, rest = split(jobs)
        shared, own = codec.pack(common), {name: codec.pack(job) for name, job in rest.items()}

        def ask(nodes: Iterable[str], seconds: float) -> Answers:
            found = self.link.send({n: own[n] for n in nodes}, kind, round, seconds, shared, largest)
            self.traffic += [(name, WireBytes(**vars(taken))) for name, taken in found.traffic.items()]
            return _read(found)

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


def passing(reason: str) -> bool:
    """Will it be otherwise soon?"""
    return "did not answer" in reason or "is not connected" in reason
