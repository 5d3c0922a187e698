"""The engine's runtime over Flower: jobs go to devices, straight or through edges, and come back checked."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie import tree as T
from coterie.codec import Value
from coterie.errors import CoterieError
from coterie.method import Edge, EdgeId, Method, State, Upload
from coterie.runtimes.flower import validate as v
from coterie.runtimes.flower.asking import HELLO, Answers, Asking, passing
from coterie.runtimes.flower.edge_messages import Shelf, filled, pack_edge
from coterie.runtimes.flower.plan import Plan
from coterie.runtimes.flower.roster import Roster, Seat
from coterie.runtimes.flower.transport.link import FlowerLink
from coterie.runtimes.flower.wirebook import WireBook

RETRY = 60.0  # seconds after which a refused node is asked again
MOMENT = 20.0  # seconds a node that is gone is expected back before a round starts
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
        self.asking = Asking(link, plan.model_dump_json())
        self._refused: dict[str, tuple[str, float]] = {}  # why, and when
        self._told: dict[str, str] = {}  # refusals that have been logged
        self._last_seen: dict[int, float] = {}
        self._edges_asked = 0.0
        self._attached: Mapping[EdgeId, Edge] = {}  # the method's edges in this round
        self._merged: dict[EdgeId, tuple[list[int], State, Upload]] = {}  # those that were merged on edges

    def close(self) -> None:
        pass

    def trouble(self, text: str) -> None:
        log.warning("%s", text)
        self.errors = [*self.errors, text][-20:]

    # ---- who is here -------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """See who is connected, and say hello to who is new."""
        nodes, now = set(self.link.nodes()), time.monotonic()
        self._refused = {n: r for n, r in self._refused.items() if n in nodes and now - r[1] < RETRY}
        known = {s.name for s in self.roster.seats.values() if not s.behind_edge} | self.edges.keys()
        self._hello(sorted(nodes - known - self._refused.keys()))
        self.edges = {e: d for e, d in self.edges.items() if e in nodes}
        self._ask_edges()
        behind = {name for devices in self.edges.values() for name in devices}
        self.here = {c for c, s in self.roster.seats.items() if s.name in (behind if s.behind_edge else nodes)}
        self._last_seen |= dict.fromkeys(self.here, now)
        self.seen()

    def _hello(self, nodes: Sequence[str]) -> None:
        replies, errors = self.asking.hello(nodes)
        for name, hello in replies.items():
            if isinstance(hello, dict) and "devices" in hello:
                self.edges[name] = []
                log.info("edge %s is here", name)
            else:
                self._seat(name, name, hello)
        for name, reason in errors.items():
            if not passing(reason):
                self._refuse(name, reason)

    def _seat(self, name: str, via: str, hello: Value) -> None:
        try:
            seat = self.roster.seat(name, via, hello)
            log.info("%s is client %s%s", name, seat.client, f", behind {via}" if seat.behind_edge else "")
            self._told.pop(name, None)
        except CoterieError as e:
            self._refuse(name, str(e))

    def _refuse(self, name: str, reason: str) -> None:
        self._refused[name] = reason, time.monotonic()
        if self._told.get(name) != reason:
            self.trouble(f"{name} is not in the run: {reason.removeprefix(f'{name}: ')}")
        self._told[name] = reason

    def _ask_edges(self) -> None:
        """Edges know who is behind them; they pass the plan on themselves and answer with the hellos of new devices."""
        full = len(self.here) >= self.roster.places and all(self.edges.values())
        if not self.edges or (full and time.monotonic() - self._edges_asked < MOMENT):
            return  # an edge itself says in a round who is gone; a newcomer is seen a moment later
        self._edges_asked = time.monotonic()
        text = {"plan": self.asking.plan}
        replies, _ = self.link.send(dict.fromkeys(self.edges, text), "who", 0, HELLO)
        for edge, reply in replies.items():
            devices = reply.get("devices", {}) if isinstance(reply, dict) else {}
            for name, hello in devices.items():
                seated = self.roster.seats.get(self.roster.numbers.get(name, -1))
                if (seated is None or seated.via != edge) and name not in self._refused:
                    self._seat(name, edge, hello)
            self.edges[edge] = sorted(devices)
            for name, reason in (reply.get("refused", {}) if isinstance(reply, dict) else {}).items():
                self._refuse(str(name), str(reason))
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

    def _gather(self) -> None:
        """Before a round: wait for those who were here a moment ago (a restart), not for those who left."""
        until = time.monotonic() + self.deadline
        while not self.stopped():
            self.look()
            here, now = sum(c < self.roster.places for c in self.here), time.monotonic()
            soon = any(now - t < MOMENT for c, t in self._last_seen.items() if c not in self.here)
            if here >= self.min_clients or (here and not soon) or now > until:
                return
            time.sleep(0.3)

    # ---- jobs --------------------------------------------------------------------------------------------------------
    def run(self, requests: Sequence[Value]) -> list[Value]:
        return [self._ask(r) for r in requests]

    def _ask(self, request: Value) -> list[Value]:
        kind, round, jobs = request["op"], request["round"], request["jobs"]
        if kind == "train":
            self._gather()
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
        self._asked = {seat.client for seat, _ in asked.values()}
        replies, errors = self._exchange(kind, round, common, asked)
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
        if kind == "train" and any(seat.client in ids for ids, _, _ in self._merged.values()):
            return {**answer, "state": None}  # checked on its edge
        if kind == "score":
            return v.scored(answer, seat.client, ctx)
        largest = 4 * max(self.declared(seat.client, round), T.nbytes(ctx.w0)) + v.SLACK
        return {**v.trained(answer, seat.client, ctx, largest), "state": None}  # it stays on the device

    # ---- the way there and back --------------------------------------------------------------------------------------
    def _exchange(self, kind: str, round: int, common: Value, asked: Mapping[str, tuple[Seat, Value]]) -> Answers:
        """Ask devices, by name, all at once; who is behind an edge is asked through it."""
        payloads: dict[str, Any] = {n: {"mine": m} for n, (seat, m) in asked.items() if not seat.behind_edge}
        behind: dict[str, dict[str, Value]] = {}
        for name, (seat, mine) in asked.items():
            if seat.behind_edge:
                behind.setdefault(seat.via, {})[name] = mine
        held = self._held({s.client: s.via for s, _ in asked.values() if s.behind_edge}) if kind == "train" else {}
        for via, jobs in behind.items():
            payloads[via] = {"mine": self._for_edge(jobs, held.get(via, {}), round)}
        most = max([1, *map(len, behind.values())])
        size = max([T.nbytes(self.method.ctx.w0), *(self.declared(i, round) for i in self._asked)])
        self.link.largest = most * (8 * size + 16 * v.SLACK)
        replies, errors = self.asking.jobs(payloads, kind, round, self.deadline, common)
        for wires in self.asking.wires:
            self.wire.count("device-cloud", {n: w for n, w in wires.items() if n not in behind})
            self.wire.count("edge-cloud", {n: w for n, w in wires.items() if n in behind})
        self.asking.wires.clear()
        for via, jobs in behind.items():
            if via in errors:
                errors |= dict.fromkeys(jobs, errors.pop(via))
                continue
            try:
                there, why = self._from_edge(replies.pop(via), jobs, held.get(via, {}))
                replies, errors = {**replies, **there}, {**errors, **why}
            except (CoterieError, KeyError, TypeError, ValueError, AttributeError) as e:
                errors |= dict.fromkeys(jobs, f"{via} answered what cannot be used: {e}")
        return replies, errors

    def _held(self, via: Mapping[int, str]) -> dict[str, dict[EdgeId, list[int]]]:
        """The method's edges whose participants are all behind one edge: {edge node: {edge: clients}}."""
        asked = self._asked
        found: dict[str, dict[EdgeId, list[int]]] = {}
        for e, edge in self._attached.items():
            here = sorted(i for i in edge.clients if i in asked)
            nodes = {via.get(i, "") for i in here}
            if len(nodes) == 1 and "" not in nodes:
                found.setdefault(nodes.pop(), {})[e] = here
        return found

    def _for_edge(self, jobs: dict[str, Value], held: dict[EdgeId, list[int]], round: int) -> Value:
        shelf, kept = Shelf(), {i for ids in held.values() for i in ids}
        devices = {}
        for name, mine in jobs.items():
            tree = {} if mine["client"] in kept else mine["each"]  # the edge makes it itself
            devices[name] = {**mine, "each": shelf.put(tree), "declared": self.declared(mine["client"], round)}
        edges = [pack_edge(self._attached[e], shelf, ids) for e, ids in held.items()]
        return {"devices": devices, "edges": edges, "tensors": shelf.tensors, "deadline": self.deadline}

    def _from_edge(self, reply: Value, jobs: dict[str, Value], held: dict[EdgeId, list[int]]) -> Answers:
        ctx = self.method.ctx
        self.wire.include(reply["wire"])
        errors = {str(n): str(e) for n, e in reply["errors"].items() if n in jobs}
        replies = {n: a for n, a in reply["answers"].items() if n in jobs and n not in errors}
        errors |= {n: f"{n} gave no answer" for n in jobs if n not in replies and n not in errors}
        name = {mine["client"]: n for n, mine in jobs.items()}
        done = {int(m["id"]): m for m in reply["merged"]}
        for e, ids in held.items():
            there = [i for i in ids if name[i] in replies]
            if not there:
                continue
            v.need(e in done and done[e]["ids"] == there, f"edge {e} was not merged from who answered")
            largest = len(ids) * (4 * T.nbytes(ctx.w0) + v.SLACK)
            tree = v.tree(done[e]["tree"], ctx, "the merged upload", largest)
            self._merged[e] = there, done[e]["state"], Upload(tree, v.note(done[e]["note"]))
            for i in there:
                replies[name[i]] = filled(replies[name[i]], i, ctx, largest)
        return replies, errors

    # ---- the loop's edges --------------------------------------------------------------------------------------------
    def attach(self, edges: Mapping[EdgeId, Edge]) -> None:
        self._attached, self._merged = edges, {}

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        """What its host made of it, or here if its uploads came through."""
        if edge.id not in self._merged:
            return self.method.merge(edge, uploads, round)
        ids, state, up = self._merged[edge.id]
        v.need(ids == [u.sender for u in uploads], f"edge {edge.id} was merged from others than those who count")
        return state, up
