"""An edge: a node to the cloud and a server to its own devices. It keeps nothing between rounds.

Devices say hello through it, jobs go through it, and what the method's edges do (relay, merge) is done here for the
clusters whose participants are all attached here. The state of those edges comes with the job and goes back with the
answer, so an edge that dies loses nothing.
"""

import logging
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie import tree as T
from coterie.codec import Value
from coterie.errors import CoterieError
from coterie.method import Method, Upload
from coterie.runtimes.flower import validate as v
from coterie.runtimes.flower.asking import Asking, passing
from coterie.runtimes.flower.certs import Certs
from coterie.runtimes.flower.device import NO_PLAN
from coterie.runtimes.flower.edge_messages import Shelf, outline, unpack_edge
from coterie.runtimes.flower.plan import Plan
from coterie.runtimes.flower.serve import superlink
from coterie.runtimes.flower.transport.link import FlowerLink
from coterie.runtimes.flower.wirebook import WireBook
from coterie.tier import called

PATIENCE = 0.85  # of the cloud's deadline that devices have; the rest is for the way up
log = logging.getLogger("coterie.edge")


@dataclass
class Bridge:
    """Answers the cloud by asking the devices of the SuperLink below."""

    link: FlowerLink
    _plan: str = ""
    _method: Method | None = None
    _asking: Asking | None = None
    _hellos: dict[str, Value] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)

    def handle(self, kind: str, round: int, value: Value) -> Value:
        v.need(isinstance(value, dict), "the message is not a dictionary")
        if kind in ("hello", "who"):
            return self.who(str(value.get("plan")))
        if kind not in ("train", "score"):
            raise CoterieError(f'an edge cannot answer "{kind}"')
        if self._asking is None or self._method is None:
            raise CoterieError(NO_PLAN)
        common, mine = value.get("common"), value.get("mine")
        v.need(isinstance(common, dict) and isinstance(mine, dict), "the message has no jobs")
        return self._pass_on(self._asking, self._method, kind, round, common, mine)

    def who(self, text: str) -> Value:
        """Who is attached here, with their hellos; new devices get the plan."""
        if text != self._plan:
            plan = Plan.read(text)
            self._method = plan.session(None, None, None).method
            self._plan, self._asking, self._hellos = text, Asking(self.link, text), {}
            log.info("run %s: %s", plan.run[:8], self._method.title)
        assert self._asking is not None
        nodes = set(self.link.nodes())
        self._refused = {n: r for n, r in self._refused.items() if n in nodes}
        replies, errors = self._asking.hello(nodes - self._hellos.keys() - self._refused.keys())
        self._hellos |= replies
        self._refused |= {n: r for n, r in errors.items() if not passing(r)}
        return {"devices": {n: self._hellos[n] for n in sorted(nodes & self._hellos.keys())}, "refused": self._refused}

    def _pass_on(
        self, asking: Asking, method: Method, kind: str, round: int, common: Any, mine: dict[str, Any]
    ) -> Value:
        shelf = Shelf(mine["tensors"])
        jobs = {str(name): dict(job) for name, job in mine["devices"].items()}
        names = {job["client"]: name for name, job in jobs.items()}
        edges = [unpack_edge(e, shelf) for e in mine.get("edges", [])]
        held: dict[int, Any] = {}
        each = {job["client"]: shelf.take(job["each"]) for job in jobs.values()}
        for edge, ids in edges:
            handed = method.relay(edge, ids, round)
            each |= {i: handed.to(i) for i in ids}
            held |= dict.fromkeys(ids, edge)
        declared = {job["client"]: job.pop("declared") for job in jobs.values()}
        payloads = {name: {"mine": {**job, "each": each[job["client"]]}} for name, job in jobs.items()}
        self.link.largest = 8 * max(T.nbytes(method.ctx.w0), *declared.values(), 0) + 16 * v.SLACK
        replies, errors = asking.jobs(payloads, kind, round, PATIENCE * float(mine["deadline"]), common)
        for i in held:
            name = names[i]
            if name in replies:
                try:
                    largest = 4 * max(declared[i], T.nbytes(method.ctx.w0)) + v.SLACK
                    replies[name] = v.trained(replies[name], i, method.ctx, largest)
                except CoterieError as e:
                    errors[name] = f"{name}: {e}"
                    del replies[name]
        trees = {i: replies[names[i]]["tree"] for i in held if names[i] in replies}
        for i, reason in v.odd_ones(trees, declared if round > 0 else {}).items():
            errors[names[i]] = f"{names[i]}: {reason}"
            del replies[names[i]]
        merged = []
        for edge, ids in edges:
            here = [replies[names[i]] for i in sorted(ids) if names[i] in replies]
            uploads = [Upload(a["tree"], a["note"], a["client"], a["samples"]) for a in here]
            if uploads:
                state, up = method.merge(edge, called(method, edge, uploads, round), round)
                who = [u.sender for u in uploads]
                merged.append({"id": edge.id, "ids": who, "state": state, "tree": up.tree, "note": dict(up.note)})
        answers = {n: outline(a) if jobs[n]["client"] in held else a for n, a in replies.items()}
        book = WireBook()
        for wires in asking.wires:
            book.count("device-edge", wires)
        asking.wires.clear()
        return {"answers": answers, "errors": errors, "merged": merged, "wire": book.close_round()}


def bridge(up: str, ca: Path, key: Path, host: str, port: int, certs: Path, state: Path) -> None:
    """Be an edge until told to stop."""
    from coterie.runtimes.flower.transport.node import Device

    for what, path in (("the authority's certificate", ca), ("the node key", key)):
        if not path.is_file():
            raise CoterieError(f"{what} {path} does not exist")
    here = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    with superlink(Certs(certs), state, host, port), FlowerLink(f"{here}:{port}", certs) as link:
        device = Device(up, ca, key, Bridge(link).handle)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: device.stopping.set())
        device.run()
