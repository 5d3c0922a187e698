"""Relays and merges the method's edges on this host; an error in one edge's part of a round affects only that edge."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from coterie.core.context import ClientId, EdgeId
from coterie.core.edges import EdgeMethod
from coterie.core.method import Method
from coterie.core.tree import Tree
from coterie.engine.edge_steps import Merging, relay
from coterie.engine.fault_isolation import contain
from coterie.engine.messages import Bytes, MergeAnswer, MergeRequest, TrainAnswer, TrainRequest

log = logging.getLogger("coterie.edge")
T = TypeVar("T")
Send = Callable[[Sequence[ClientId]], Mapping[ClientId, Tree]]  # asks clients for the rest; some may fail


@dataclass
class EdgeStage:
    """The edges of one round that this host computes."""

    method: Method
    requests: list[TrainRequest] = field(default_factory=list)  # relayed requests of the edges' clients
    missing: dict[ClientId, str] = field(default_factory=dict)  # clients that an error excludes, with the reason
    _tasks: list[tuple[MergeRequest, Bytes]] = field(default_factory=list)  # tasks and relayed bytes

    def relay(self, task: MergeRequest) -> None:
        """Turn the download of an edge into requests of its clients."""
        try:
            requests, down = relay(cast(EdgeMethod, self.method), task)
        except Exception as e:
            self._fail("relayed", task, (r.client for r in task.requests), e)
            return
        self.requests += requests
        self._tasks.append((task, down))

    def merge(self, trained: Mapping[ClientId, TrainAnswer], send: Send) -> dict[EdgeId, MergeAnswer]:
        """Merge the uploads of each relayed edge's clients; `send` asks clients that are called for the rest."""
        merging: list[Merging] = []
        for task, down in self._tasks:
            answers = [trained[r.client] for r in task.requests if r.client in trained]
            merging.append(Merging(cast(EdgeMethod, self.method), task, answers, down))
        failed = self._call(merging, send)
        merged = {}
        for m in merging:
            try:
                if m.task.edge.id not in failed:
                    merged[m.task.edge.id] = self._merge(m, send)
            except Exception as e:
                self._fail("merged", m.task, m.answered, e)
        return merged

    def _call(self, merging: Sequence[Merging], send: Send) -> set[EdgeId]:
        """Call clients until all that are called have sent the rest; return the edges whose choice raises an error."""
        failed: set[EdgeId] = set()
        while True:
            wanted: dict[EdgeId, list[ClientId]] = {}
            for m in merging:
                e = m.task.edge.id
                try:
                    wanted[e] = [] if e in failed else self._contained(m, m.wanted)
                except Exception as error:
                    failed.add(e)
                    self._fail("merged", m.task, m.answered, error)
            asked = [i for clients in wanted.values() for i in clients]
            if not asked:
                return failed
            rest = send(asked)
            for m in merging:
                theirs = wanted.get(m.task.edge.id, [])
                m.exclude(dict.fromkeys((i for i in theirs if i not in rest), ""))
                m.take({i: rest[i] for i in theirs if i in rest})

    def _merge(self, m: Merging, send: Send) -> MergeAnswer:
        """Merge an edge. If senders are excluded because of an error, choose the clients again."""
        while True:
            senders = m.senders
            answer = self._contained(m, m.merged)
            if m.senders == senders:
                return answer
            if failed := self._call([m], send):
                raise RuntimeError(f"the clients of edge {min(failed)} could not be chosen")

    def _contained(self, m: Merging, compute: Callable[[frozenset[ClientId]], T]) -> T:
        """Compute without the senders whose uploads cause an error; they are excluded from the merge."""
        contained = contain([frozenset({i}) for i in m.senders], compute)
        if not contained.left_out:
            return contained.result
        error, e = contained.error, m.task.edge.id
        log.error("edge %s could be merged only without some clients", e, exc_info=error)
        reason = f"edge {e} could not be merged with the upload: {type(error).__name__}: {error}"
        senders = sorted(frozenset[ClientId]().union(*contained.left_out))
        reasons = dict.fromkeys(senders, " ".join(reason[:400].split()))
        if len(m.senders) == len(senders):  # no other answer shows that the method itself works
            raise error or RuntimeError(reason)
        m.exclude(reasons, refused=contained.certain)
        if not contained.certain:  # the senders lose the round, and the error is not counted against them
            self.missing |= reasons
        return contained.result

    def _fail(self, step: str, task: MergeRequest, clients: Iterable[ClientId], error: Exception) -> None:
        log.error("edge %s could not be %s", task.edge.id, step, exc_info=error)
        reason = f"edge {task.edge.id} could not be {step}: {type(error).__name__}: {error}"
        self.missing |= dict.fromkeys(clients, reason)
