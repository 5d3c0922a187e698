"""The interface of runtimes: a runtime takes requests, returns answers, and owns transport, client states and edges."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from coterie.config import Engine
from coterie.core.context import ClientId, State
from coterie.core.edges import EdgeMethod
from coterie.core.method import Method
from coterie.engine.attacks import Attack
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
Replies = tuple[dict[ClientId, A], dict[ClientId, str]]  # answers by client, and reasons of missing answers by client
Work = Literal["train", "score"]  # kind of work of a worker process
JobCost = Callable[[ClientId], int]  # expected duration of a client's work, in any unit


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
    SET_BACK = auto()  # most answers show that the model diverged: the server goes back to an earlier state
    REPEAT = auto()  # too few clients count: its result is dropped, and the same plan is run again


class Runtime(ABC):
    """A runtime returns answers, or reasons for missing ones, in any order; the round does not depend on its kind."""

    method: Method
    trusted = False  # True: clients are part of this program, so a wrong upload is an error of the method
    attack: Attack | None = None  # liars among the clients; a simulation only
    cpu: float | None = None  # processor seconds of the clients' training in the last round, if they are known

    @abstractmethod
    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        """Train clients locally. Their new states are pending until `keep` is called."""

    @abstractmethod
    def score(self, requests: Sequence[ScoreRequest]) -> Replies[ScoreAnswer]: ...

    @abstractmethod
    def keep(self, round: int, clients: Sequence[ClientId]) -> None:
        """Keep the new states of these clients, whose answers the round accepted; drop those of all others."""

    @abstractmethod
    def save(self) -> Index:
        """Make all kept states durable and return their index for the checkpoint."""

    @abstractmethod
    def restore(self, index: Index | None, older: Sequence[Index] = ()) -> None:
        """Go back to a checkpoint; raise CoterieError if a state that it names is missing or damaged."""

    @abstractmethod
    def forget(self, oldest_kept: int) -> None:
        """Delete states that only checkpoints before this round refer to."""

    @abstractmethod
    def close(self) -> None: ...

    def conclude(self, plan: RoundPlan, answers: RoundAnswers, result: RoundResult) -> Conclusion:
        """Record the clients that the round excludes, and decide whether its result counts.

        `answers` is what `run` returned. Only called for a runtime whose clients are not `trusted`.
        """
        return Conclusion.ACCEPT

    def named(self, client: ClientId, reason: str) -> str:
        """Return the reason with the client's name in front, if it has one."""
        return reason

    def over(self) -> None:
        """Tell the clients that all rounds are done."""
        return None

    def newcomers(self) -> Sequence[ClientId]:
        """Return the clients that joined when all seats were taken: they are scored, never sampled."""
        return ()

    def run(self, plan: RoundPlan) -> RoundAnswers:
        """Compute a whole round; the default computes edges in this process."""
        requests, handed = list(plan.direct), []
        for task in plan.edges:
            assert isinstance(self.method, EdgeMethod)
            theirs, down = relay(self.method, task)
            requests += theirs
            handed.append(down)
        trained, missing = self.train(requests)
        if self.attack is not None:
            trained = self.attack.falsified(self.method, {r.client: r for r in requests}, trained)
        merged: dict[int, MergeAnswer] = {}
        for task, down in zip(plan.edges, handed, strict=True):
            assert isinstance(self.method, EdgeMethod)
            answers = [trained[r.client] for r in task.requests if r.client in trained]
            merged[task.edge.id] = merge(self.method, task, answers, down)
        return RoundAnswers(trained, merged, missing)


class Simulation(Runtime):
    """A runtime within one program: all clients answer, and their states are in memory or in the run's folder."""

    trusted = True

    def __init__(self, method: Method, states: ClientStates, cost: JobCost = lambda client: 1):
        self.method, self.states, self.cost = method, states, cost
        self._pending: dict[ClientId, State | Remote] = {}

    @abstractmethod
    def _train(self, jobs: Sequence[Job]) -> list[TrainResult]:
        """Run the jobs and return their results in any order."""

    @abstractmethod
    def _score(self, jobs: Sequence[Job]) -> list[ScoreAnswer]: ...

    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        done = self._train([Job(r, self.states.handle(r.client)) for r in requests])
        self._pending = {d.answer.client: d.state for d in done}
        self.cpu = sum(d.cpu for d in done)
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
        """Distribute jobs over workers, longest first to the least busy; workers without jobs are omitted."""
        heaps: list[list[Job]] = [[] for _ in range(workers)]
        load = [0] * workers
        for job in sorted(jobs, key=lambda j: -self.cost(j.request.client)):
            w = load.index(min(load))
            heaps[w].append(job)
            load[w] += self.cost(job.request.client)
        return [heap for heap in heaps if heap]
