"""Computes everything in this process, and copies values as between processes."""

from collections.abc import Sequence

import torch

from coterie.engine.codec import deep_copy
from coterie.engine.messages import Job, ScoreAnswer, TrainResult
from coterie.runtimes.base import JobCost, Simulation
from coterie.storage.client_states import ClientStates
from coterie.train.clients import Clients
from coterie.train.devices import CPU


class Inline(Simulation):
    def __init__(
        self,
        clients: Clients,
        states: ClientStates,
        cost: JobCost = lambda client: 1,
        device: torch.device = CPU,
    ):
        super().__init__(clients.method, states, cost)
        self.clients = clients.on(device)

    def _train(self, jobs: Sequence[Job]) -> list[TrainResult]:
        ordered = [job for heap in self._balanced(jobs, 1) for job in heap]
        return list(deep_copy(self.clients.train(deep_copy(ordered))))

    def _score(self, jobs: Sequence[Job]) -> list[ScoreAnswer]:
        ordered = [job for heap in self._balanced(jobs, 1) for job in heap]
        return list(deep_copy(self.clients.score(deep_copy(ordered))))

    def close(self) -> None:
        pass
