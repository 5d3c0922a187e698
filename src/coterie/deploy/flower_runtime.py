"""The engine's runtime over Flower: jobs go to devices, straight or through edges, and come back checked."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie import tree as T
from coterie.codec import Value
from coterie.deploy import validate as v
from coterie.deploy.device_app import NO_PLAN
from coterie.deploy.plan import Plan
from coterie.deploy.roster import Roster, Seat
from coterie.deploy.transport import FlowerLink
from coterie.deploy.wirebook import WireBook
from coterie.errors import CoterieError
from coterie.method import Method

HELLO = 120.0  # seconds to load data and build a model
log = logging.getLogger("coterie.cloud")


class FlowerRuntime:
    """One worker as far as the loop knows: everybody is asked at once."""

    workers = 1

    def __init__(
        self, link: FlowerLink, plan: Plan, method: Method, roster: Roster, deadline: float,
        declared: Callable[[int, int], int], min_clients: int = 1,
        stopped: Callable[[], bool] = lambda: False, seen: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self.link, self.plan, self.method, self.roster = link, plan, method, roster
        self.deadline, self.declared, self.min_clients = deadline, declared, min_clients
        self.stopped, self.seen = stopped, seen
        self.wire = WireBook()
        self.here: set[int] = set()  # clients that are connected now
        self.edges: dict[str, list[str]] = {}  # edges that are connected, with their connected devices
        self.errors: list[str] = []  # the latest, for a person
        self._refused: dict[str, str] = {}
        link.largest = 8 * T.nbytes(method.ctx.w0) + 16 * v.SLACK

    def close(self) -> None:
        pass

    def trouble(self, text: str) -> None:
        log.warning("%s", text)
        self.errors = [*self.errors, text][-20:]

    # ---- who is here -------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """See who is connected, and say hello to who is new."""
        nodes = set(self.link.nodes())
        for gone in set(self._refused) - nodes:
            del self._refused[gone]
        known = {s.via for s in self.roster.seats.values()} | self.edges.keys()
        self._hello(sorted(nodes - known - self._refused.keys()))
        self.edges = {e: d for e, d in self.edges.items() if e in nodes}
        self._ask_edges()
        behind = {name for devices in self.edges.values() for name in devices}
        self.here = {c for c, s in self.roster.seats.items() if s.name in (behind if s.behind_edge else nodes)}
        self.seen()

    def _hello(self, nodes: Sequence[str]) -> None:
        if not nodes:
            return
        text = {"plan": self.plan.model_dump_json()}
        replies, errors = self.link.send(dict.fromkeys(nodes, text), "hello", 0, HELLO)
        for name, hello in replies.items():
            if isinstance(hello, dict) and "devices" in hello:
                self.edges[name] = []
                log.info("edge %s is here", name)
            else:
                self._seat(name, name, hello)
        for name, reason in errors.items():
            if not _passing(reason):
                self._refused[name] = reason
                self.trouble(f"{name} is not in the run: {reason.removeprefix(f'{name}: ')}")

    def _seat(self, name: str, via: str, hello: Value) -> None:
        try:
            seat = self.roster.seat(name, via, hello)
            log.info("%s is client %s%s", name, seat.client, f", behind {via}" if seat.behind_edge else "")
        except CoterieError as e:
            self._refused[name] = str(e)
            self.trouble(f"{name} is not in the run: {e}")

    def _ask_edges(self) -> None:
        """Edges know who is behind them; they pass the plan on themselves and answer with the hellos of new devices."""
        if not self.edges:
            return
        text = {"plan": self.plan.model_dump_json()}
        replies, _ = self.link.send(dict.fromkeys(self.edges, text), "who", 0, HELLO)
        for edge, reply in replies.items():
            devices = reply.get("devices", {}) if isinstance(reply, dict) else {}
            for name, hello in devices.items():
                seated = self.roster.seats.get(self.roster.numbers.get(name, -1))
                if (seated is None or seated.via != edge) and name not in self._refused:
                    self._seat(name, edge, hello)
            self.edges[edge] = sorted(devices)
            for name, reason in reply.get("refused", {}).items():
                if self._refused.get(name) != reason:
                    self._refused[name] = reason
                    self.trouble(f"{name} is not in the run: {reason}")
        for edge in set(self.edges) - replies.keys():
            del self.edges[edge]

    def wait(self, clients: int, seconds: float) -> bool:
        """Until so many of the places are taken by connected devices; False if time ran out or a stop was asked for."""
        until = time.monotonic() + seconds
        while True:
            self.look()
            if sum(c < self.roster.places for c in self.here) >= clients:
                return True
            if time.monotonic() > until or self.stopped():
                return False
            time.sleep(0.3)

    # ---- jobs --------------------------------------------------------------------------------------------------------
    def run(self, requests: Sequence[Value]) -> list[Value]:
        return [self._ask(r) for r in requests]

    def _ask(self, request: Value) -> list[Value]:
        kind, round, jobs = request["op"], request["round"], request["jobs"]
        if kind == "train":
            self.wait(self.min_clients, self.deadline)
        common = {k: request[k] for k in ("shared", "watch", "global", "trained") if k in request}
        common["run"] = self.plan.run
        answers: dict[int, Value] = {}
        missing: dict[int, str] = {}
        asked: dict[str, tuple[Seat, Value]] = {}
        for job in jobs:
            client, seat = job["client"], self.roster.seats.get(job["client"])
            if seat is None or client not in self.here:
                missing[client] = (
                    f"client {client} is not connected" if seat is None else f"{seat.name} is not connected"
                )
                continue
            base = -1 if job["state"] is None else int(job["state"])
            mine = {"client": client, "base": base, "each": job["each"], "share": float(job.get("share", 1.0))}
            asked[seat.name] = seat, mine
        replies, errors = self.exchange(kind, round, common, asked)
        for name, (seat, _) in asked.items():
            if name in errors:
                missing[seat.client] = errors[name]
                continue
            try:
                answers[seat.client] = self._checked(kind, round, seat, replies[name])
            except CoterieError as e:
                missing[seat.client] = f"{name}: {e}"
        if kind == "train":
            trees = {c: a["tree"] for c, a in answers.items() if not a.get("checked")}
            sizes = {c: self.declared(c, round) for c in trees if round > 0}
            for client, reason in v.odd_ones(trees, sizes).items():
                missing[client] = f"{self.roster.seats[client].name}: {reason}"
                del answers[client]
        for reason in missing.values():
            self.trouble(f"round {round}, {kind}: {reason}")
        return [answers.get(j["client"]) or {"client": j["client"], "missing": missing[j["client"]]} for j in jobs]

    def _checked(self, kind: str, round: int, seat: Seat, answer: Value) -> Value:
        ctx = self.method.ctx
        if kind == "score":
            return v.scored(answer, seat.client, ctx)
        largest = 4 * max(self.declared(seat.client, round), T.nbytes(ctx.w0)) + v.SLACK
        return {**v.trained(answer, seat.client, ctx, largest), "state": None}  # it stays on the device

    def exchange(
        self, kind: str, round: int, common: Value, asked: Mapping[str, tuple[Seat, Value]]
    ) -> tuple[dict[str, Value], dict[str, str]]:
        """Ask devices, by name; who is behind an edge is asked through it."""
        direct = {name: {"mine": mine} for name, (seat, mine) in asked.items() if not seat.behind_edge}
        replies, errors = self._send(direct, kind, round, self.deadline, common)
        return replies, errors

    def _send(
        self, payloads: dict[str, Any], kind: str, round: int, deadline: float, common: Value
    ) -> tuple[dict[str, Value], dict[str, str]]:
        """One exchange with nodes of this SuperLink; one that lost the plan is told again and asked again."""
        if not payloads:
            return {}, {}
        until = time.monotonic() + deadline
        replies, errors = self.link.send(payloads, kind, round, deadline, shared={"common": common})
        self.wire.count("device-cloud", self.link.wires)
        forgot = [n for n, e in errors.items() if NO_PLAN in e]
        if forgot:
            self._hello(forgot)
            left = max(1.0, until - time.monotonic())
            more, errors_ = self.link.send({n: payloads[n] for n in forgot}, kind, round, left, {"common": common})
            self.wire.count("device-cloud", self.link.wires)
            replies, errors = {**replies, **more}, {n: e for n, e in errors.items() if n not in forgot} | errors_
        return replies, errors


def _passing(reason: str) -> bool:
    """Will it be otherwise soon?"""
    return "did not answer" in reason or "is not connected" in reason
