"""Asking the nodes of one SuperLink about one run: hello first, then jobs. The same in the cloud and in an edge."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from coterie.codec import Value
from coterie.runtimes.flower.device import NO_PLAN
from coterie.runtimes.flower.transport.link import FlowerLink, Wire

HELLO = 120.0  # seconds to load data and build a model
Answers = tuple[dict[str, Value], dict[str, str]]  # replies, and reasons of those who gave none, by name


class Asking:
    def __init__(self, link: FlowerLink, plan: str):
        self.link, self.plan = link, plan
        self.wires: list[dict[str, Wire]] = []  # of the jobs since somebody took them

    def hello(self, nodes: Iterable[str]) -> Answers:
        names = sorted(nodes)
        return self.link.send({n: {"plan": self.plan} for n in names}, "hello", 0, HELLO) if names else ({}, {})

    def jobs(self, payloads: Mapping[str, Any], kind: str, round: int, deadline: float, common: Value) -> Answers:
        """One exchange; a node that lost the plan is told again and asked again. Reasons come without the name."""
        if not payloads:
            return {}, {}
        until, shared = time.monotonic() + deadline, {"common": common}
        replies, errors = self.link.send(payloads, kind, round, deadline, shared)
        self.wires.append(self.link.wires)
        forgot = [n for n, e in errors.items() if NO_PLAN in e]
        if forgot:
            _, lost = self.hello(forgot)
            left = max(1.0, until - time.monotonic())
            again = {n: payloads[n] for n in forgot if n not in lost}
            more, errors_ = self.link.send(again, kind, round, left, shared) if again else ({}, {})
            self.wires.append(self.link.wires)
            replies, errors = {**replies, **more}, {**errors, **lost, **errors_}
            errors = {n: e for n, e in errors.items() if n not in replies}
        return replies, errors


def passing(reason: str) -> bool:
    """Will it be otherwise soon?"""
    return "did not answer" in reason or "is not connected" in reason
