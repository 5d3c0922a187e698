"""What every runtime does: it takes requests and returns answers, and alone owns transport, client state and edges."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Protocol, TypeVar

from coterie.config import Engine
from coterie.core.edges import EdgeMethod
from coterie.core.method import ClientId, Method, State
from coterie.engine.edge_steps import merge, relay
from coterie.engine.messages import (
    Job,
    MergeAnswer,
    Remote,
    ScoreAnswer,
    ScoreRequest,
    TrainAnswer,
    TrainRequest,
    TrainResult,
)
from coterie.engine.round import RoundAnswers, RoundPlan, RoundResult
from coterie.storage.client_states import ClientStates, Index
from coterie.train.clients import Clients

A = TypeVar("A")
Replies = tuple[dict[ClientId, A], dict[ClientId, str]]  # answers, and why others gave none
Cost = Callable[[ClientId], int]  # how long a client takes, in any unit


class Setup(Protocol):
    """The parts of a session that a simulation is opened with."""

    @property
    def engine(self) -> Engine: ...

    def clients(self) -> Clients: ...

    def states(self, folder: Path) -> ClientStates: ...

    def cost(self, client: ClientId) -> int: ...


class Interrupted(Exception):  # noqa: N818  # not an error: a stop was requested
    """A stop was requested while the runtime waited; this round does not count."""


class Conclusion(Enum):
    """The decision about a round that was aggregated."""

    ACCEPT = auto()  # its result counts
    REPEAT = auto()  # too few clients count: its result is dropped, and the same plan is run again


class Runtime(ABC):
    """Answers come in any order, or with a reason why not; the round does not know which runtime it is."""

    method: Method
    trusted = False  # are clients part of this program, so that a wrong upload is a mistake of the method

    @abstractmethod
    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        """Local training. The new states are pending until `keep` says that they count."""

    @abstractmethod
    def score(self, requests: Sequence[ScoreRequest]) -> Replies[ScoreAnswer]: ...

    @abstractmethod
    def keep(self, round: int, clients: Sequence[ClientId]) -> None:
        """Keep the new states of these clients, whose answers the round accepted; drop those of all others."""

    @abstractmethod
    def save(self) -> Index:
        """Everything that counts is durable afterwards; the index goes into the checkpoint."""

    @abstractmethod
    def restore(self, index: Index | None, older: Sequence[Index] = ()) -> None:
        """Go back to a checkpoint; raises CoterieError if a state it names is missing or damaged."""

    @abstractmethod
    def forget(self, oldest_kept: int) -> None:
        """No checkpoint before this round is kept any more."""

    @abstractmethod
    def close(self) -> None: ...

    def conclude(self, plan: RoundPlan, answers: RoundAnswers, result: RoundResult) -> Conclusion:
        """Record the clients that the round excludes, and decide whether its result counts.

        `answers` is what `run` returned. Only called for a runtime whose clients are not `trusted`.
        """
        return Conclusion.ACCEPT

    def named(self, client: ClientId, reason: str) -> str:
        """The reason with the client's name, where it has one."""
        return reason

    def over(self) -> None:
        """All rounds are done: whoever waits for more may be told."""
        return None

    def newcomers(self) -> Sequence[ClientId]:
        """Clients that came when all places were taken: they are scored, never sampled."""
        return ()

    def run(self, plan: RoundPlan) -> RoundAnswers:
        """A whole round; the default computes edges here."""
        requests, handed = list(plan.direct), []
        for task in plan.edges:
            assert isinstance(self.method, EdgeMethod)
            theirs, down = relay(self.method, task)
            requests += theirs
            handed.append(down)
        trained, missing = self.train(requests)
        merged: dict[int, MergeAnswer] = {}
        for task, down in zip(plan.edges, handed, strict=True):
            assert isinstance(self.method, EdgeMethod)
            answers = [trained[r.client] for r in task.requests if r.client in trained]
            merged[task.edge.id] = merge(self.method, task, answers, down)
        return RoundAnswers(trained, merged, missing)


class Simulation(Runtime):
    """Runtimes of one program: all clients answer, and their states are in memory or in the run's folder."""

    trusted = True

    def __init__(self, method: Method, states: ClientStates, cost: Cost = lambda client: 1):
        self.method, self.states, self.cost = method, states, cost
        self._pending: dict[ClientId, State | Remote] = {}

    @abstractmethod
    def _train(self, jobs: Sequence[Job]) -> list[TrainResult]:
        """In any order."""

    @abstractmethod
    def _score(self, jobs: Sequence[Job]) -> list[ScoreAnswer]: ...

    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        done = self._train([Job(r, self.states.handle(r.client)) for r in requests])
        self._pending = {d.answer.client: d.state for d in done}
        return {d.answer.client: d.answer for d in done}, {}

    def score(self, requests: Sequence[ScoreRequest]) -> Replies[ScoreAnswer]:
        answers = self._score([Job(r, self.states.handle(r.client)) for r in requests])
        return {a.client: a for a in answers}, {}

    def keep(self, round: int, clients: Sequence[ClientId]) -> None:
        for i in clients:
            self.states.put(i, self._pending[i], round)
        self._pending = {}

    def save(self) -> Index:
        return self.states.save()

    def restore(self, index: Index | None, older: Sequence[Index] = ()) -> None:
        self._pending = {}
        self.states.restore(index, older)

    def forget(self, oldest_kept: int) -> None:
        self.states.forget(oldest_kept)

    def _balanced(self, jobs: Sequence[Job], workers: int) -> list[list[Job]]:
        """Jobs spread over workers, longest first to the least busy; workers without any are left out."""
        heaps: list[list[Job]] = [[] for _ in range(workers)]
        load = [0] * workers
        for job in sorted(jobs, key=lambda j: -self.cost(j.request.client)):
            w = load.index(min(load))
            heaps[w].append(job)
            load[w] += self.cost(job.request.client)
        return [heap for heap in heaps if heap]
