"""Edges relayed and merged on this host, cloud or edge; an error in one edge's part of a round is that edge's alone."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from coterie.core.edges import EdgeMethod
from coterie.core.method import ClientId, EdgeId, Method
from coterie.engine.edge_steps import merge, relay
from coterie.engine.fault_isolation import contain
from coterie.engine.messages import Bytes, MergeAnswer, MergeRequest, TrainAnswer, TrainRequest

log = logging.getLogger("coterie.edge")


@dataclass
class EdgeStage:
    """The edges of one round that are computed here."""

    method: Method
    requests: list[TrainRequest] = field(default_factory=list)  # of their clients, with what is handed on
    missing: dict[ClientId, str] = field(default_factory=dict)  # clients that lost the round, and why
    _tasks: list[tuple[MergeRequest, Bytes]] = field(default_factory=list)

    def relay(self, task: MergeRequest) -> None:
        try:
            requests, down = relay(cast(EdgeMethod, self.method), task)
        except Exception as e:
            self._failed("relayed", task, (r.client for r in task.requests), e)
            return
        self.requests += requests
        self._tasks.append((task, down))

    def merge(self, trained: Mapping[ClientId, TrainAnswer]) -> dict[EdgeId, MergeAnswer]:
        merged = {}
        for task, down in self._tasks:
            answers = [trained[r.client] for r in task.requests if r.client in trained]
            try:
                merged[task.edge.id] = self._merge(task, answers, down)
            except Exception as e:
                self._failed("merged", task, (a.client for a in answers), e)
        return merged

    def _merge(self, task: MergeRequest, answers: Sequence[TrainAnswer], down: Bytes) -> MergeAnswer:
        """Without the senders whose uploads make it fail."""

        def compute(left_out: frozenset[ClientId]) -> MergeAnswer:
            kept = [a for a in answers if a.client not in left_out]
            return merge(cast(EdgeMethod, self.method), task, kept, down)

        found = contain([frozenset({a.client}) for a in answers], compute)
        if not found.left_out:
            return found.result
        e = found.error
        log.error("edge %s could be merged only without some clients", task.edge.id, exc_info=e)
        reason = f"edge {task.edge.id} could not be merged with the upload: {type(e).__name__}: {e}"
        culprits = dict.fromkeys(sorted(frozenset[ClientId]().union(*found.left_out)), " ".join(reason[:400].split()))
        if len(answers) == len(culprits):  # nobody is left to tell the sender from the method
            raise e or RuntimeError(reason)
        if not found.certain:  # they lose the round, and nobody is blamed
            self.missing |= culprits
            return found.result
        return replace(found.result, refused={**found.result.refused, **culprits})

    def _failed(self, what: str, task: MergeRequest, clients: Iterable[ClientId], error: Exception) -> None:
        log.error("edge %s could not be %s", task.edge.id, what, exc_info=error)
        reason = f"edge {task.edge.id} could not be {what}: {type(error).__name__}: {error}"
        self.missing |= dict.fromkeys(clients, reason)
