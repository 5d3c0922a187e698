"""Relays and merges the method's edges on this host; an error in one edge's part of a round affects only that edge."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from coterie.core.context import ClientId, EdgeId
from coterie.core.edges import EdgeMethod
from coterie.core.method import Method
from coterie.engine.edge_steps import merge, relay
from coterie.engine.fault_isolation import contain
from coterie.engine.messages import Bytes, MergeAnswer, MergeRequest, TrainAnswer, TrainRequest

log = logging.getLogger("coterie.edge")


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

    def merge(self, trained: Mapping[ClientId, TrainAnswer]) -> dict[EdgeId, MergeAnswer]:
        """Merge the uploads of each relayed edge's clients."""
        merged = {}
        for task, down in self._tasks:
            answers = [trained[r.client] for r in task.requests if r.client in trained]
            try:
                merged[task.edge.id] = self._merge(task, answers, down)
            except Exception as e:
                self._fail("merged", task, (a.client for a in answers), e)
        return merged

    def _merge(self, task: MergeRequest, answers: Sequence[TrainAnswer], down: Bytes) -> MergeAnswer:
        """Merge an edge without the senders whose uploads cause an error."""

        def compute(excluded: frozenset[ClientId]) -> MergeAnswer:
            rest = [a for a in answers if a.client not in excluded]
            return merge(cast(EdgeMethod, self.method), task, rest, down)

        contained = contain([frozenset({a.client}) for a in answers], compute)
        if not contained.left_out:
            return contained.result
        error = contained.error
        log.error("edge %s could be merged only without some clients", task.edge.id, exc_info=error)
        reason = f"edge {task.edge.id} could not be merged with the upload: {type(error).__name__}: {error}"
        senders = sorted(frozenset[ClientId]().union(*contained.left_out))
        reasons = dict.fromkeys(senders, " ".join(reason[:400].split()))
        if len(answers) == len(senders):  # no other answer shows that the method itself works
            raise error or RuntimeError(reason)
        if not contained.certain:  # the senders lose the round, and the error is not counted against them
            self.missing |= reasons
            return contained.result
        return replace(contained.result, refused={**contained.result.refused, **reasons})

    def _fail(self, step: str, task: MergeRequest, clients: Iterable[ClientId], error: Exception) -> None:
        log.error("edge %s could not be %s", task.edge.id, step, exc_info=error)
        reason = f"edge {task.edge.id} could not be {step}: {type(error).__name__}: {error}"
        self.missing |= dict.fromkeys(clients, reason)
