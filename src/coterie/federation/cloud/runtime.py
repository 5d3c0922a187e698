"""The cloud's side of a federation: sends requests to devices, directly or through edges, and checks answers."""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from coterie.core import tree as T
from coterie.core.method import ClientId, EdgeId, Method
from coterie.engine.messages import (
    MergeAnswer,
    MergeRequest,
    ScoreAnswer,
    ScoreRequest,
    TrainAnswer,
    TrainRequest,
    check,
)
from coterie.engine.round import RoundAnswers, RoundPlan, RoundResult
from coterie.errors import CoterieError, sentence
from coterie.federation.cloud.dispatch import Dispatcher, Greeting, Link, lost
from coterie.federation.cloud.liveness import Liveness
from coterie.federation.cloud.upload_bounds import Judgement, judge, judge_uploads
from coterie.federation.edge_stage import EdgeStage
from coterie.federation.identity.admin import SUSPENDED, seat_orders
from coterie.federation.identity.roles import NodeRole, scoped
from coterie.federation.identity.seats import Roster, read_attached, read_hello
from coterie.federation.policy.audit import AUDIT_FILE, AuditLine, AuditLog
from coterie.federation.policy.quarantine import Quarantine
from coterie.federation.protocol.messages import (
    Answer,
    DeviceJob,
    EdgeAnswer,
    EdgeJob,
    Hello,
    JobKind,
    NodeJob,
    Request,
)
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.transport import Cause, Failure, UnreachableError
from coterie.federation.validation import SamplesError, check_answer, check_merged, check_wire, room
from coterie.federation.wire_bytes import WireBytesLog
from coterie.runtimes.base import Conclusion, Interrupted, Replies, Runtime
from coterie.storage.client_states import Index

RETRY = 60.0  # seconds after which a refused node is asked again
PAUSE, PAUSE_MOST = 1.0, 30.0  # seconds before a round is repeated, twice as many each time, and at most
SILENT = 2  # rounds in a row in which a node let the deadline pass, after which nobody waits for it
MOMENT = 20.0  # seconds a node that is gone is expected back before a round starts
log = logging.getLogger("coterie.cloud")


@dataclass(frozen=True)
class WaitingRules:
    """How many clients the cloud waits for and how long, and what it takes from them."""

    min_clients: int = 1  # connected before a round, and of those who are asked so many must count
    deadline: float = 600.0  # seconds, for the answers of a round
    stopped: Callable[[], bool] = lambda: False  # has somebody asked to stop?
    clients: frozenset[ClientId] = frozenset()  # before the first round also these, none of whom may be refused
    seconds: float = math.inf  # that a run which has begun waits for enough clients
    norm_bound: float = 50.0  # times the usual size of an upload; 0: no bound
    quarantine_after: int = 3  # refusals; 0: never


class QuorumError(CoterieError):
    """Too few clients for too long; the command line exits with code 3."""


@dataclass
class _Found:
    """What came of asking."""

    answers: dict[ClientId, Answer] = field(default_factory=dict)
    missing: dict[ClientId, str] = field(default_factory=dict)
    passing: set[ClientId] = field(default_factory=set)  # of the missing: not there, not in time, or not asked
    merged: dict[EdgeId, MergeAnswer] = field(default_factory=dict)
    refused: dict[ClientId, str] = field(default_factory=dict)  # answers that are not what they must be,
    by_edge: set[ClientId] = field(default_factory=set)  # and those of them that their edge answers for


class FederationRuntime(Runtime):
    """Client states are on the devices; the cloud only knows which version of each counts."""

    def __init__(
        self,
        method: Method,
        link: Link,
        plan: FederationPlan,
        roles: Callable[[], Mapping[str, NodeRole]],  # of all registered nodes, as they are now
        folder: Path,  # for roster.json and wire.jsonl
        patience: WaitingRules,
        seen: Callable[["FederationRuntime"], None] = lambda runtime: None,  # told whenever something has changed
    ):
        self.method, self.link, self.plan, self.roles, self.patience, self.seen = (
            method, link, plan, roles, patience, seen
        )  # fmt: skip
        self.roster = Roster(folder / "roster.json", len(method.ctx.clients))
        self.wire = WireBytesLog(folder / "wire.jsonl")
        self.audit = AuditLog(folder / AUDIT_FILE)
        self.here: set[ClientId] = set()  # who is connected now
        self.edges: dict[str, list[str]] = {}  # edges that are connected, with their connected devices (EDGE/DEVICE)
        self.errors: list[str] = []  # the latest, for a person
        self.begun = False  # have enough clients come for the first round?
        self.paused = ""  # why the run cannot go on for now
        self.quarantine = Quarantine(folder, patience.quarantine_after)
        self._paused_at: float | None = None
        self._attempts = 0  # of the present round that did not count
        self._asked: set[ClientId] = set()  # connected clients that the present round asked
        self._found = _Found()  # what came of asking the last time
        self._judged = Judgement({}, {})  # of the present round's uploads,
        self._judged_merged = Judgement({}, {})  # and of what edges have merged,
        self._merged_from: dict[EdgeId, tuple[ClientId, ...]] = {}  # from whom
        self.presence = Liveness()  # for a person; decisions rest on `here`
        link.looked = self._waiting
        self._asking = Dispatcher(link, plan.model_dump_json(), plan.run, method, self.audit)
        self._greeting = Greeting(self._asking)
        self._silent: dict[str, int] = {}  # nodes that let a deadline pass, and how often in a row
        self._version = torch.full((plan.places,), -1, dtype=torch.int64)
        self._round = 0  # the last one that was closed
        self._roles: Mapping[str, NodeRole] = {}
        self._refused: dict[str, tuple[str, float]] = {}  # why, and when
        self._told: dict[str, str] = {}  # refusals that have been logged
        self._last_seen = dict.fromkeys(
            self.roster.numbers.values(), time.monotonic()
        )  # of a resumed run: they come back
        self._edges_asked = 0.0
        self._away = False  # does the SuperLink not answer?
        self._again: set[str] = set()  # devices that say hello again, because they have other data than they said

    # ---- what counts -------------------------------------------------------------------------------------------------
    def conclude(self, plan: RoundPlan, answers: RoundAnswers, result: RoundResult) -> Conclusion:
        """Count refusals, and see whether enough of the clients that were asked count for the round.

        Uploads with NaN count as answers: asked again, their senders would answer the same.
        """
        t = plan.round
        behind = {i for answer in self._found.merged.values() for i in answer.senders}  # their edge may be to blame
        for client, reason in sorted(result.refused.items()):
            name = self._blamed(client)
            if client in result.doubtful or client in behind or name is None:
                continue
            if self.quarantine.refuse(name, t, reason):
                times = self.quarantine.offenders[name].refusals
                self._trouble(f"round {t}: {name}: in quarantine after {times} refusals, until `coterie release`")
        got, need = len(result.accepted) + len(result.nonfinite), min(self.patience.min_clients, len(self._asked))
        if got >= need:
            self._attempts = 0
            self._go_on()
            edges = [e for e, senders in self._merged_from.items() if set(senders) <= set(result.accepted)]
            self.quarantine.remember(t, self._judged.usual(result.accepted), self._judged_merged.usual(edges))
            for client, reason in result.left_out.items():
                self._trouble(f"round {t}: {self._named(client, reason)}")
                self._note_lost(t, "train", client, reason)
                if client not in self._found.passing and not self.quarantine.holds(self._name(client)):
                    self.presence.refused(self._name(client), t, reason)
            return Conclusion.ACCEPT
        self._attempts += 1
        for client, reason in result.left_out.items():
            self._trouble(f"round {t}: {self._named(client, reason)}")
        self._pause(f"round {t} is repeated: {got} of at least {need} clients count")
        until = time.monotonic() + min(PAUSE_MOST, PAUSE * 2 ** (self._attempts - 1))
        while time.monotonic() < until:
            self._check_patience()
            time.sleep(min(0.3, max(0.0, until - time.monotonic())))
        return Conclusion.REPEAT

    def _blamed(self, client: ClientId) -> str | None:
        """The sender of a refused answer: the device, or the edge whose own answer was refused."""
        entry = self.roster.entries.get(client)
        if entry is None:
            return None
        return entry.edge if entry.edge is not None and client in self._found.by_edge else entry.name

    def _pause(self, why: str) -> None:
        """Told once, however long it lasts; ends the run when the operator's patience is over."""
        now = time.monotonic()
        self._paused_at = self._paused_at or now
        if not self.paused:
            until = "" if math.isinf(self.patience.seconds) else f" for at most {self.patience.seconds:g} s"
            self._trouble(f"paused, waiting{until}: {why}")
        self.paused = self.presence.doing = why
        self.seen(self)
        self._check_patience()

    def _check_patience(self) -> None:
        if self.patience.stopped():
            raise Interrupted
        if self._paused_at is not None and time.monotonic() - self._paused_at > self.patience.seconds:
            raise QuorumError(f"too few clients for {self.patience.seconds:g} s: {self.paused}")

    def _go_on(self) -> None:
        if self.paused:
            log.info("enough clients are here, the run goes on")
        self.paused, self._paused_at = "", None

    def keep(self, round: int, clients: Sequence[ClientId]) -> None:
        self._version[list(clients)] = round
        self._round = round
        for client in clients:
            self.presence.uploaded(self._name(client), round)

    def save(self) -> Index:
        """The states themselves are durable since the devices answered."""
        self.wire.close_round(self._round)
        self.seen(self)
        return Index(self._version.clone(), torch.zeros_like(self._version))

    def restore(self, index: Index | None, older: Sequence[Index] = ()) -> None:
        if index is not None and len(index.version) != len(self._version):
            raise CoterieError(f"the checkpoint has {len(index.version)} clients, the run has {len(self._version)}")
        self._version = torch.full_like(self._version, -1) if index is None else index.version.clone()
        self.quarantine.go_back(int(self._version.max()))

    def forget(self, oldest_kept: int) -> None:
        """Devices keep as many versions as their operators allow, and say so when one is asked for that is gone."""

    def newcomers(self) -> Sequence[ClientId]:
        return self.roster.newcomers

    def over(self) -> None:
        """Tell devices and edges that the run has ended; one that is away now sees the next run."""
        in_it = {name.partition("/")[0] for name in self.roster.numbers}  # who never said hello has nothing to end
        try:
            untold = self._asking.over(in_it & set(self.link.nodes()), self.plan.run, self._round)
        except CoterieError as e:
            log.warning("devices were not told that the run has ended: %s", e)
            return
        for name, failed in sorted(untold.items()):
            log.info("%s was not told that the run has ended: %s", name, failed.why)

    def close(self) -> None:
        self.seen(self)

    def _note_lost(self, round: int, message: str, client: ClientId, reason: str) -> None:
        """In the audit log: whose answer did not come, or was refused."""
        name = self._name(client)
        why = sentence(reason.removeprefix(f"{name}: "))
        self.audit.write(lost(self.plan.run, round, message, name, why, client in self._found.passing))

    def _trouble(self, text: str) -> None:
        log.warning("%s", text)
        self.errors = [*self.errors, text][-20:]

    def _name(self, client: ClientId) -> str:
        return self.roster.name(client) or f"client {client}"

    def _named(self, client: ClientId, reason: str) -> str:
        """The reason with the node's name before it."""
        name = self._name(client)
        via = name.partition("/")[0]
        return reason if reason.startswith((f"{name} ", f"{name}:", f"{via}:")) else f"{name}: {reason}"

    def named(self, client: ClientId, reason: str) -> str:
        return self._named(client, reason)

    @property
    def known_roles(self) -> Mapping[str, NodeRole]:
        """Of the nodes that the operator has registered here."""
        return self._roles

    @property
    def out(self) -> dict[str, str]:
        """Nodes that are not in the run, and why."""
        found = {name: reason for name, (reason, _) in self._refused.items()}
        found |= {name: f"in quarantine: {reason}" for name, reason in self.quarantine.out.items()}
        for name, role in self._roles.items():
            out = [name] if role.suspended else [scoped(name, device) for device in role.without]
            found |= dict.fromkeys(out, SUSPENDED)
        return found

    # ---- who is here -------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Update the connected nodes, and send the plan to new ones."""
        connected, now = self._connected(), time.monotonic()
        for name in self.quarantine.released():
            log.info("%s was released from quarantine", name)
        before = self._roles
        try:
            self._roles = self.roles()
        except CoterieError as e:
            self._trouble(str(e))  # what was known before counts
        for name, client in self.roster.numbers.items():  # nobody waits for who was removed, suspended or quarantined
            via, _, device = name.partition("/")
            removed = via in before and via not in self._roles
            if removed or self._suspended(via, device) or self.quarantine.holds(name):
                self._last_seen.pop(client, None)
        self._obey()
        nodes = {n for n in connected if not self._suspended(n) and not self.quarantine.holds(n)}
        edges = {n for n in nodes if self._roles.get(n, NodeRole()).is_edge}
        gone = {n for n in self._refused if n.partition("/")[0] not in nodes}
        self._refused = {n: r for n, r in self._refused.items() if n not in gone and now - r[1] < RETRY}
        known = {entry.name for entry in self.roster.entries.values()} - self._again - self._mute
        if self.begun:  # before the first round, which waits for hellos, nobody gets more of them by connecting anew
            self._greeting.gone(connected)
        self._hello(sorted(nodes - edges - known - self._refused.keys()))
        self._ask_edges(edges - self._refused.keys())
        behind = {name for edge, devices in self.edges.items() for name in devices if not self._suspended(edge, name)}
        here = behind | (nodes - edges - self._mute - self._again)  # nobody is asked while his hello is on its way
        self.here = {
            c
            for c, entry in self.roster.entries.items()
            if entry.name in here and not self.quarantine.holds(entry.name)
        }
        self._last_seen |= dict.fromkeys(self.here, now)
        self.presence.here(connected, {e: set(devices) for e, devices in self.edges.items()})
        self.seen(self)

    def _connected(self) -> set[str]:
        """Nodes of the SuperLink; nobody while it does not answer, which is waited for like absent devices."""
        try:
            found = set(self.link.nodes())
            self._away = False
        except UnreachableError as e:
            if not self._away:
                self._trouble(f"{e}; waiting for it")
            self._away = True
            return set()
        return found

    @property
    def _mute(self) -> set[str]:
        """Nodes that are asked nothing until they have said hello again, which nobody waits for."""
        return {name for name, times in self._silent.items() if times >= SILENT}

    def _suspended(self, node: str, device: str = "") -> bool:
        role = self._roles.get(node, NodeRole())
        return role.suspended or device.rpartition("/")[2] in role.without

    def _obey(self) -> None:
        """Do what the operator has ordered about seats since the last look."""
        for path, order in seat_orders(self.roster.path.parent):
            try:
                if order is None:
                    raise CoterieError(f"{path} is no order")
                held = int(self._version[c]) if (c := self.roster.numbers.get(order.name, -1)) in self._seats else -1
                number = self.roster.free(order.name, order.to, max(self._round, held))
                self._last_seen.pop(number, None)
                self.here.discard(number)
                log.info("seat %s of %s is free%s", number, order.name, f" for {order.to}" if order.to else "")
            except CoterieError as e:
                self._trouble(str(e))
            path.unlink(missing_ok=True)

    def _waiting(self, connected: Collection[str], asked: Collection[str]) -> None:
        """Told by the link while a round waits for answers: nothing but the status file depends on it."""
        self.presence.here(set(connected), {e: set(d) for e, d in self.edges.items() if e in connected})
        self.presence.waiting_for = sorted(asked)
        self.seen(self)

    def _hello(self, nodes: Sequence[str]) -> None:
        replies, errors = self._greeting.ask(nodes)
        for name, reply in sorted(replies.items()):
            self._silent.pop(name, None)
            try:
                self._admit(name, read_hello(reply))
            except CoterieError as e:
                self._refuse(name, str(e))
        self._refuse_all(errors)

    def _admit(self, name: str, hello: Hello, write: bool = True) -> None:
        self._again.discard(name)
        try:
            log.info("%s is client %s", name, self.roster.admit(name, hello, write).client)
            self._told.pop(name, None)
        except CoterieError as e:
            self._refuse(name, str(e))

    def _refuse_all(self, errors: Mapping[str, Failure]) -> None:
        for name, failed in errors.items():
            if not failed.passing:
                self._refuse(name, failed.why)

    def _refuse(self, name: str, reason: str) -> None:
        self._refused[name] = reason, time.monotonic()
        if self._told.get(name) != reason and self._asking.spare.allows(name):
            why = reason.removeprefix(f"{name}: ")
            self._trouble(f"{name} is not in the run: {why}")
            self.audit.write(AuditLine(self.plan.run, 0, "hello", "in", name, refused=sentence(why)))
        self._told[name] = reason

    def _ask_edges(self, edges: Collection[str]) -> None:
        """Edges know who is behind them; they pass the plan on and answer with the hellos of their devices."""
        self.edges = {e: devices for e, devices in self.edges.items() if e in set(edges) - self._mute}
        full = len(self.here) >= self.roster.places and all(self.edges.values()) and len(self.edges) == len(edges)
        if full and time.monotonic() - self._edges_asked < MOMENT:
            return  # an edge itself says in a round who is gone; a newcomer is seen a moment later
        self._edges_asked = time.monotonic()
        replies, errors = self._asking.edges(edges)
        for edge, reply in sorted(replies.items()):
            self._silent.pop(edge, None)
            try:
                found = read_attached(edge, self._roles.get(edge, NodeRole()), reply)
            except CoterieError as e:
                self._refuse(edge, str(e))
                self.edges.pop(edge, None)
                continue
            known = {entry.name for entry in self.roster.entries.values()} - self._again
            named = {edge, *found.hellos, *found.refused}
            for kept in (self._refused, self._told):  # nothing is kept of names that it does not say any more
                for name in [n for n in kept if n.partition("/")[0] == edge and n not in named]:
                    del kept[name]
            seats = len(self.roster.numbers)
            for name, hello in found.hellos.items():
                if name not in known and name not in self._refused:
                    self._admit(name, hello, write=False)
            if len(self.roster.numbers) > seats:
                self.roster.write()
            for name, reason in found.refused.items():
                self._refuse(name, reason)
            if edge in edges:
                self.edges[edge] = sorted(found.hellos)
        for edge in errors:
            self.edges.pop(edge, None)
        self._refuse_all(errors)

    def _gather(self) -> None:
        """Wait for enough clients, before every round; a resumed run also waits for those it had, for a moment."""
        if not self.begun:
            log.info("waiting for %s clients", self.patience.min_clients)
        since, pause = time.monotonic(), 0.02
        while True:
            self._check_patience()
            self.presence.doing, self.presence.waiting_for = self._missing()
            self.look()
            if self.patience.clients and self._refused:
                raise CoterieError(f"some clients cannot take part: {self.errors[-1]}")
            here, now = sum(c < self.roster.places for c in self.here), time.monotonic()
            soon = any(now - t < MOMENT for c, t in self._last_seen.items() if c not in self.here)
            soon = soon or (not self.begun and bool(self._greeting.waiting(MOMENT)))
            enough = here >= self.patience.min_clients and self.patience.clients <= self.here
            if enough and (self.begun or not soon):
                break
            if self.begun and not soon:
                self._paused_at = self._paused_at or since
                self._pause(f"{here} of at least {self.patience.min_clients} clients are connected")
            time.sleep(pause)
            pause = min(0.3, 1.5 * pause)
        self.begun = True
        if not self._attempts:
            self._go_on()
        self.presence.doing, self.presence.waiting_for = "", []

    def _missing(self) -> tuple[str, list[str]]:
        """What the cloud waits for before a round, in words, and who it is, where that is known."""
        here, least = sum(c < self.roster.places for c in self.here), self.patience.min_clients
        recent = time.monotonic() - MOMENT
        known = [
            name
            for name, c in sorted(self.roster.numbers.items())
            if c not in self.here and (not self.begun or self._last_seen.get(c, recent) > recent)
        ]
        if here < least:
            return f"{here} of {least} clients are here", known
        return "before the next round", known

    # ---- a round -----------------------------------------------------------------------------------------------------
    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        self._gather()
        found = self._ask("train", requests)
        return cast(dict[ClientId, TrainAnswer], found.answers), {**found.missing, **found.refused}

    def score(self, requests: Sequence[ScoreRequest]) -> Replies[ScoreAnswer]:
        found = self._ask("score", requests)
        missing = {**found.missing, **found.refused}
        for client, reason in missing.items():
            self._trouble(f"after round {self._round}: {self._named(client, reason)}")
            self._note_lost(self._round + 1, "score", client, reason)
        return cast(dict[ClientId, ScoreAnswer], found.answers), missing

    def run(self, plan: RoundPlan) -> RoundAnswers:
        """An edge whose clients are all behind one node is relayed and merged there, every other one here."""
        self._gather()
        asked = {r.client for r in plan.direct} | {r.client for task in plan.edges for r in task.requests}
        self._asked = asked & self.here
        tier = EdgeStage(self.method)
        there: list[tuple[str, MergeRequest]] = []
        absent = {r.client for task in plan.edges for r in task.requests} - self.here
        for whole in plan.edges:
            task = replace(whole, requests=tuple(r for r in whole.requests if r.client not in absent))
            nodes = {self.roster.entries[r.client].edge for r in task.requests}
            if len(nodes) == 1 and (node := nodes.pop()) is not None:
                there.append((node, task))
            else:
                tier.relay(task)
        found = self._ask("train", [*plan.direct, *tier.requests], there)
        trained = cast(dict[ClientId, TrainAnswer], found.answers)
        requests = [r for r in (*plan.direct, *tier.requests) if r.client in trained and trained[r.client].upload]
        judged = judge(requests, trained, self.patience.norm_bound, self.quarantine.memory)
        self._judged = judged
        found.refused |= judged.refused
        trained = {i: a for i, a in trained.items() if i not in judged.refused}
        merged = self._plausible(plan, found, {**found.merged, **tier.merge(trained)})
        missing = {**{i: self._absent(i) for i in absent}, **found.missing, **tier.missing}
        found.passing |= absent
        trained = {i: a for i, a in trained.items() if i not in missing and i not in found.refused}
        return RoundAnswers(
            trained,
            merged,
            {i: self._named(i, why) for i, why in missing.items()},
            {i: self._named(i, why) for i, why in found.refused.items()},
        )

    def _plausible(
        self, plan: RoundPlan, found: _Found, merged: Mapping[EdgeId, MergeAnswer]
    ) -> dict[EdgeId, MergeAnswer]:
        """Without what an edge has merged that is too large. Its clients lose the round, and nobody is counted."""
        sent = {task.edge.id: task.edge.received[0] for task in plan.edges}
        uploads = {e: answer.upload for e, answer in merged.items()}
        judged = judge_uploads(sent, uploads, self.patience.norm_bound, self.quarantine.merged)
        lies = {e: why for e, why in judged.refused.items() if e in found.merged}  # the rest was merged here
        for e, why in lies.items():
            for client in merged[e].senders:
                found.refused[client] = f"{self.roster.entries[client].via}: edge {e}: {why}"
        self._judged_merged = judged
        self._merged_from = {e: answer.senders for e, answer in merged.items() if e not in lies}
        return {e: answer for e, answer in merged.items() if e not in lies}

    def _absent(self, client: ClientId) -> str:
        name = self._name(client)
        via, _, device = name.partition("/")
        if self.quarantine.holds(name):
            return f"{name}: it is in quarantine"
        if self._suspended(via, device):
            return f"{name}: {SUSPENDED}"
        return f"{name} is not connected"

    # ---- the way there and back --------------------------------------------------------------------------------------
    def _ask(
        self, kind: JobKind, requests: Sequence[Request], tasks: Sequence[tuple[str, MergeRequest]] = ()
    ) -> _Found:
        """Ask all clients at once; those behind an edge through the edge."""
        found = _Found()
        jobs: dict[str, NodeJob] = {}
        asked: dict[str, list[Request]] = {}  # by node
        passed: dict[str, list[Request]] = {}  # through an edge, as they are
        merges: dict[str, list[MergeRequest]] = {}
        for r in requests:
            if r.client not in self.here:
                found.missing[r.client] = self._absent(r.client)
                found.passing.add(r.client)
                continue
            entry = self.roster.entries[r.client]
            asked.setdefault(entry.via, []).append(r)
            if entry.edge is not None:
                passed.setdefault(entry.edge, []).append(r)
            else:
                jobs[entry.name] = DeviceJob(self.plan.run, self._base(r.client), r)
        for node, task in tasks:
            merges.setdefault(node, []).append(task)
            asked.setdefault(node, []).extend(task.requests)
        for node in sorted({*passed, *merges}):
            ids = [r.client for r in asked[node]]
            jobs[node] = EdgeJob(
                self.plan.run,
                self.patience.deadline,
                {i: self.roster.entries[i].device for i in ids},
                {i: self._base(i) for i in ids},
                tuple(passed.get(node, ())),
                tuple(merges.get(node, ())),
                self.patience.norm_bound,
            )
        round = next((r.round for many in asked.values() for r in many), 0)
        self.presence.doing = f"round {round}: training" if kind == "train" else f"after round {self._round}: scoring"
        self.presence.waiting_for = sorted(jobs)
        largest = max((self._room(job) for job in jobs.values()), default=0)
        replies, errors = self._asking.jobs(jobs, kind, round, self.patience.deadline, largest)
        for node, job in jobs.items():
            link = "edge-cloud" if isinstance(job, EdgeJob) else "device-cloud"
            for traffic in (t for n, t in self._asking.traffic if n == node):
                self.wire.count(link, traffic)
            failed = errors.get(node)
            if failed is not None and failed.cause is Cause.LATE:
                self._silent[node] = self._silent.get(node, 0) + 1
            else:
                self._silent.pop(node, None)
            if failed is not None:
                reasons = {r.client: failed.why for r in asked[node]}
                if failed.cause is Cause.WRONG:
                    found.refused |= reasons
                    found.by_edge |= reasons.keys()
                else:
                    found.missing |= reasons
                if failed.passing:
                    found.passing |= reasons.keys()
                continue
            try:
                if isinstance(job, EdgeJob):
                    self._take(found, node, asked[node], job, check(replies[node], EdgeAnswer))
                else:
                    (r,) = asked[node]
                    found.answers[r.client] = self._checked(replies[node], r)
            except CoterieError as e:
                found.refused |= {r.client: f"{node}: {e}" for r in asked[node]}
                found.by_edge |= {r.client for r in asked[node]}
        self._asking.traffic.clear()
        self._found = found
        self.presence.doing, self.presence.waiting_for = "", []
        return found

    def _base(self, client: ClientId) -> int:
        """The round whose state counts; the one of a seat's former holder does not."""
        found = int(self._version[client]) if client in self._seats else -1
        return found if found > self.roster.emptied.get(client, -1) else -1

    @property
    def _seats(self) -> range:
        return range(len(self._version))

    def _checked(self, answer: Answer, request: Request) -> Answer:
        entry = self.roster.entries[request.client]
        try:
            return check_answer(answer, request, entry.samples, self.method.ctx.task)
        except SamplesError:
            self._again.add(entry.name)
            raise

    def _room(self, job: NodeJob) -> int:
        """Bytes that the answer may have; nobody knows how large the state of an edge may get."""
        each = room(self.method, ["up"])
        if isinstance(job, DeviceJob):
            return each
        state = (room(self.method, ["edge_up", "up", "down"]) + T.nbytes(self.method.ctx.w0)) * 4
        return each * len(job.names) + sum(state * (1 + len(task.edge.clients)) for task in job.merges)

    def _take(self, found: _Found, node: str, asked: Sequence[Request], job: EdgeJob, answer: EdgeAnswer) -> None:
        """An edge's answers for its devices. It may answer only for those it was asked about."""
        self.wire.count("device-edge", check_wire(answer.wire))
        requests = {r.client: r for r in asked}
        answers: dict[ClientId, Answer] = {}
        missing = {i: sentence(why) for i, why in answer.missing.items() if i in requests}
        refused = {i: sentence(why) for i, why in answer.refused.items() if i in requests and i not in missing}
        for a in answer.answers:
            if a.client not in requests or a.client in answers or a.client in missing or a.client in refused:
                raise CoterieError(f"it answers for client {a.client}, who was not asked, or twice")
            try:
                answers[a.client] = self._checked(a, requests[a.client])
            except CoterieError as e:
                refused[a.client] = str(e)
        lost: dict[ClientId, str] = {}  # clients of clusters that the edge has not merged as it should
        done = {m.edge: m for m in answer.merged}
        for task in job.merges:
            trained = {r.client: answers[r.client] for r in task.requests if r.client in answers}
            try:
                if task.edge.id not in done:
                    raise CoterieError("it was not merged")
                got = cast(dict[ClientId, TrainAnswer], trained)
                checked = check_merged(self.method, done[task.edge.id], task, got)
                reasons = {i: sentence(why) for i, why in checked.refused.items()}
                found.merged[task.edge.id] = replace(checked, refused=reasons)
            except CoterieError as e:
                lost |= dict.fromkeys(trained, f"{node}: edge {task.edge.id}: {e}")
        missing |= {i: "it gave no answer" for i in requests if i not in {*answers, *missing, *refused}}
        found.answers |= {i: a for i, a in answers.items() if i not in {*missing, *refused, *lost}}
        found.refused |= {i: f"{self._name(i)}: {why}" for i, why in refused.items()} | lost
        found.missing |= {i: f"{self._name(i)}: {why}" for i, why in missing.items()}
        found.by_edge |= lost.keys()
        found.passing |= missing.keys()
