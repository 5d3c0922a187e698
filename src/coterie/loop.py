"""The round: sample, send, train, aggregate, evaluate, record. Knows no method by name and no runtime's inside."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from coterie import checkpoint
from coterie import tree as T
from coterie.codec import Value
from coterie.evaluation import Evaluation, Watch, notes
from coterie.folder import Folder
from coterie.ledger import Ledger
from coterie.method import ClientId, Download, Edge, EdgeId, Method, State, Upload
from coterie.official import Official
from coterie.rng import torch_rng
from coterie.runtimes.states import Store
from coterie.runtimes.workers import Runtime
from coterie.tier import AtCloud, Tier, called

CLIENTS_PER_REQUEST = 256  # bounds memory when every client is scored


@dataclass(frozen=True)
class Schedule:
    """What the loop does and when; the method's own settings are elsewhere."""

    rounds: int
    seed: int
    eval_every: int = 10
    checkpoint_every: int = 10
    watch: bool = True  # score participants before and after local training
    final_trained: bool = True  # after the last round, every client also after local training
    dropout: float = 0.0  # share of the sampled clients that fail
    stragglers: float = 0.0  # share that does fewer epochs
    newcomers: tuple[ClientId, ...] = ()  # never sampled, scored only
    official: bool = False  # score on the official test part too
    gm_head: Literal["mean", "init"] = "mean"  # of the model for all where the method has none
    log_updates: bool = False  # how far the participants' own models moved, together and at most
    eval_clients: int | None = None  # so many of the clients, and of the newcomers, are scored; None: all


@dataclass
class Progress:
    """What a spectator is told after each round."""

    round: int
    rounds: int
    accuracy: float | None
    seconds: float


@dataclass
class Loop:
    method: Method
    runtime: Runtime
    store: Store
    folder: Folder
    cost: Callable[[ClientId], int]  # how long a client takes, in any unit
    schedule: Schedule
    server: State = field(default_factory=dict)
    edges: dict[EdgeId, State] = field(default_factory=dict)
    done: int = -1  # last finished round

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.method.part)
        self.tier: Tier = AtCloud(self.method)

    # ---- the run ---------------------------------------------------------------------------------------------
    def run(
        self, tell: Callable[[Progress], None] = lambda p: None, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Run to the end; False if `stopped` said so (a checkpoint has been written)."""
        first = 0 if self.method.opening() else 1
        if self.done < 0:
            self.server = self.method.setup()
            self.folder.open_logs()
            self.done = first - 1
        for t in range(self.done + 1, self.schedule.rounds + 1):
            start = time.perf_counter()
            accuracy = self._round(t)
            self.done = t
            seconds = time.perf_counter() - start
            self.folder.timing(round=t, seconds=round(seconds, 6))
            tell(Progress(t, self.schedule.rounds, accuracy, seconds))
            halt = stopped()
            if halt or t == self.schedule.rounds or t % self.schedule.checkpoint_every == 0:
                checkpoint.write(self)
            if halt and t < self.schedule.rounds:
                return False
        return True

    def _round(self, t: int) -> float | None:
        """One round; returns the accuracy a spectator wants to see, if there is one."""
        plan, method = self.schedule, self.method
        ids = sorted(set(method.sample(self.server, t, torch_rng(plan.seed, "sample", t))))
        failed = {i for i in ids if t > 0 and _unlucky(plan.seed, "dropout", t, i, plan.dropout)}
        downloads, attached = self._send_down(ids, t)
        self.tier.attach(attached or {})
        answers, missing = _present(self._train([i for i in ids if i not in failed], downloads, t))
        uploads, broken = self._receive(answers, attached, t)
        if uploads:
            self._aggregate(uploads, attached, t)
        watch = Watch.of(answers) if plan.watch else None
        result = self.evaluate(t) if t > 0 and (t == plan.rounds or t % plan.eval_every == 0) else None
        if result is not None and not result.clients:
            result = None  # nobody answered
        if result is not None:
            self.folder.evaluation(t, result.arrays())
        self.folder.event(
            round=t,
            participants=ids,
            failed=sorted({*failed, *missing}),
            nonfinite=broken,
            steps=sum(a["steps"] for a in answers),
            loss=_mean([a["loss"] for a in answers if a["steps"] and math.isfinite(a["loss"])]),
            bytes=self.ledger.close_round(),
            notes=notes(answers),
            facts=method.facts(self.server),
            watch=watch.summary() if watch else {},
            eval=result.summary() if result else {},
            **({"reasons": missing} if missing else {}),  # only where clients can fail by themselves
        )
        if result is not None:
            return result.headline()
        return watch.headline() if watch else None

    # ---- one round's steps -----------------------------------------------------------------------------------
    def _attach(self, ids: Sequence[ClientId]) -> dict[EdgeId, Edge] | None:
        """The edges that serve these clients, with their state; None when all clients talk to the cloud.

        A client that no edge serves (a newcomer, or one not assigned yet) talks to the cloud beside them."""
        layout = self.method.edges(self.server)
        if layout is None:
            return None
        wanted = set(ids)
        return {
            e: Edge(e, tuple(members), self.edges.get(e) or self.method.init_edge(e, members), Download())
            for e, members in sorted(layout.items())
            if wanted & set(members)
        }

    def _send_down(self, ids: Sequence[ClientId], t: int) -> tuple[Download, dict[EdgeId, Edge] | None]:
        """What reaches the clients, counted on every link it crosses."""
        sent = self.method.down(self.server, ids, t)
        attached = self._attach(ids)
        for e, edge in (attached or {}).items():
            self.ledger.count("edge-cloud", "down", {**sent.shared, **sent.edge.get(e, {})})
            for i in edge.clients:
                self.ledger.count("edge-cloud", "down", sent.each.get(i, {}))
        handed, attached = (sent, None) if attached is None else self._relay(sent, attached, ids, t)
        served = _served(attached)
        for i in ids:
            self.ledger.count("device-edge" if i in served else "device-cloud", "down", handed.to(i))
        return handed, attached

    def _relay(
        self, sent: Download, attached: dict[EdgeId, Edge], ids: Sequence[ClientId], t: int
    ) -> tuple[Download, dict[EdgeId, Edge]]:
        wanted, served = set(ids), _served(attached)
        each: dict[ClientId, T.Tree] = {i: sent.to(i) for i in ids if i not in served}
        for e, edge in attached.items():
            attached[e] = edge = Edge(e, edge.clients, edge.state, sent)
            here = [i for i in edge.clients if i in wanted]
            handed = self.method.relay(edge, here, t)
            each |= {i: handed.to(i) for i in here}
        return Download(each=each), attached

    def _train(self, ids: Sequence[ClientId], downloads: Download, t: int) -> list[Value]:
        share = {
            i: float(torch.rand((), generator=torch_rng(self.schedule.seed, "share", t, i)))
            if _unlucky(self.schedule.seed, "straggler", t, i, self.schedule.stragglers)
            else 1.0
            for i in ids
        }
        jobs = [self._job(i, downloads) | {"share": share[i]} for i in ids]
        head = {"op": "train", "round": t, "shared": downloads.shared, "watch": self.schedule.watch}
        head["moves"] = self.schedule.log_updates
        return self._scatter(head, jobs)

    def _job(self, client: ClientId, downloads: Download) -> dict[str, Any]:
        return {"client": client, "state": self.store.handle(client), "each": dict(downloads.each.get(client, {}))}

    def _scatter(self, head: dict[str, Any], jobs: list[dict[str, Any]]) -> list[Value]:
        """Spread jobs over the workers, longest first to the least busy, and return answers in the order of jobs."""
        heaps: list[list[dict[str, Any]]] = [[] for _ in range(self.runtime.workers)]
        load = [0] * len(heaps)
        for job in sorted(jobs, key=lambda j: -self.cost(j["client"])):
            w = load.index(min(load))
            heaps[w].append(job)
            load[w] += self.cost(job["client"])
        replies = self.runtime.run([head | {"jobs": heap} for heap in heaps if heap])
        by_client = {a["client"]: a for reply in replies for a in reply}
        return [by_client[j["client"]] for j in jobs]

    def _receive(
        self, answers: list[Value], attached: dict[EdgeId, Edge] | None, t: int
    ) -> tuple[list[Upload], list[ClientId]]:
        """Keep what is finite, put client states away, and leave the rest out (it has crossed its link even so)."""
        uploads, broken, served = [], [], _served(attached)
        for a in answers:
            if not a.get("checked") and not T.finite(a["tree"]):
                broken.append(a["client"])
                self.ledger.count("device-edge" if a["client"] in served else "device-cloud", "up", a["tree"])
                continue
            self.store.put(a["client"], a["state"], t)
            uploads.append(Upload(a["tree"], a["note"], a["client"], a["samples"]))
        return uploads, broken

    def _aggregate(self, uploads: list[Upload], attached: dict[EdgeId, Edge] | None, t: int) -> None:
        served = _served(attached)
        direct = [u for u in uploads if u.sender not in served]
        for u in direct:
            self.ledger.count("device-cloud", "up", u.tree)
        merged: list[Upload] = []
        for e, edge in (attached or {}).items():
            here = [u for u in uploads if u.sender in set(edge.clients)]
            if not here:
                continue
            here = called(self.method, edge, here, t)
            for u in here:
                self.ledger.count("device-edge", "up", u.tree)
            self.edges[e], up = self.tier.merge(edge, here, t)
            self.ledger.count("edge-cloud", "up", up.tree)
            merged.append(Upload(up.tree, up.note, e, sum(u.samples for u in here)))
        self.server = self.method.aggregate(self.server, [*merged, *direct], t)

    # ---- evaluation ------------------------------------------------------------------------------------------
    def evaluate(self, t: int) -> Evaluation:
        """The clients, newcomers included, after the aggregation of round t; nothing is counted or kept."""
        method, plan = self.method, self.schedule
        everybody = sorted({*self._scored(method.ctx.clients), *self._scored(plan.newcomers)})
        whole = method.global_model(self.server)
        answers: list[Value] = []
        outside = Official(self.runtime, method, whole, plan.newcomers, plan.gm_head) if plan.official else None
        for a in range(0, len(everybody), CLIENTS_PER_REQUEST):
            ids = everybody[a : a + CLIENTS_PER_REQUEST]
            downloads = self._preview(ids, t + 1)
            head = {"op": "score", "round": t + 1, "shared": downloads.shared, "global": whole}
            head["trained"] = plan.final_trained and t == plan.rounds
            if outside is not None:
                head["official"] = {"global": outside.known}
            got, _ = _present(self._scatter(head, [self._job(i, downloads) for i in ids]))
            if outside is not None:
                outside.take(got)
            answers += got
        if outside is not None:
            outside.finish(answers)
        return Evaluation.of(answers, set(plan.newcomers))

    def _scored(self, ids: Sequence[ClientId]) -> Sequence[ClientId]:
        """All, or as many as the run asks for: the same ones every time, so that curves compare like with like."""
        n = self.schedule.eval_clients
        if n is None or n >= len(ids):
            return ids
        order = torch.randperm(len(ids), generator=torch_rng(self.schedule.seed, "scored"))
        return [ids[int(i)] for i in order[:n]]

    def _preview(self, ids: Sequence[ClientId], t: int) -> Download:
        """What these clients are handed to score and use before round t."""
        sent = self.method.deliver(self.server, ids, t)
        attached = self._attach(ids)
        return sent if attached is None else self._relay(sent, attached, ids, t)[0]

    def download(self, client: ClientId) -> T.Tree:
        """What one client would receive now."""
        return self._preview([client], self.done + 1).to(client)


def _present(answers: Sequence[Value]) -> tuple[list[Value], dict[ClientId, str]]:
    """Who answered, and why the others did not (in a simulation everybody does)."""
    return [a for a in answers if "missing" not in a], {a["client"]: a["missing"] for a in answers if "missing" in a}


def _served(attached: dict[EdgeId, Edge] | None) -> set[ClientId]:
    return {i for edge in (attached or {}).values() for i in edge.clients}


def _unlucky(seed: int, what: str, t: int, client: ClientId, share: float) -> bool:
    return share > 0 and float(torch.rand((), generator=torch_rng(seed, what, t, client))) < share


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


__all__ = ["Loop", "Progress", "Schedule"]
