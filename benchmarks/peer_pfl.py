"""FedAvg in pfl-research, as in its benchmarks, in two processes.

torchrun --nproc-per-node 2 benchmarks/peer_pfl.py W1 FILE   (started by bench.py)
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from contender import stored
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from plain_pytorch import WORKLOADS
from turn_taking import next_round, say

NAME, FILE = sys.argv[1], Path(sys.argv[2])
W = WORKLOADS[NAME]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = W.model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.train(not eval and len(y) > 1)  # batch norm cannot learn from one sample
        return F.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, float]:
        return {}


class Timed(TrainingProcessCallback):
    """Measures the time from one model to the next."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.chosen = sizes, []
        self.first = True

    def on_train_begin(self, *, model):  # type: ignore[no-untyped-def]
        self._turn()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        seconds = time.perf_counter() - self.begin
        samples = torch.tensor(float(sum(self.sizes[i] for i in self.chosen)))  # samples of this process
        if distributed.world_size > 1:
            torch.distributed.all_reduce(samples)
        if distributed.global_rank == 0:
            say(seconds=seconds, samples=int(samples))
        return self._turn(), Metrics()

    def _turn(self) -> bool:
        """Wait in all processes for the next turn."""
        over = torch.zeros(1)
        if distributed.global_rank == 0:
            if self.first:
                say(ready=True)
            over += next_round() is None
        self.first = False
        self.chosen.clear()
        if distributed.world_size > 1:
            torch.distributed.broadcast(over, 0)
        self.begin = time.perf_counter()
        return bool(over)


def main() -> None:
    torch.set_num_threads(1)
    np.random.seed(0)  # all processes draw the same users and divide them
    clients = stored(FILE)
    sizes = [len(y) for _, y in clients]
    timed = Timed(sizes)

    def make_dataset(user: int) -> Dataset:
        timed.chosen.append(user)
        x, y = clients[user]
        order = torch.randperm(sizes[user])
        return Dataset((x[order], y[order]), user_id=str(user))

    # pfl uses the weights (numbers of samples) to give every process about the same work
    weights = {i: sizes[i] for i in range(W.clients)}
    data = FederatedDataset(make_dataset, get_user_sampler("random", [*weights]), user_id_to_weight=weights)
    net = Net()
    central = torch.optim.SGD(net.parameters(), lr=1.0)
    model = PyTorchModel(net, local_optimizer_create=torch.optim.SGD, central_optimizer=central)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6, evaluation_frequency=10**7, train_cohort_size=W.join, val_cohort_size=0
        ),
        SimulatedBackend(training_data=data, val_data=None),
        model,
        NNTrainHyperParams(local_batch_size=W.batch, local_num_epochs=W.epochs, local_learning_rate=W.lr),
        callbacks=[timed],
        send_metrics_to_platform=False,
    )
    if distributed.world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
