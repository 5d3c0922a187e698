"""FedAvg in Flower's simulation, as in its documentation: a ServerApp, a ClientApp, two Ray actors.

python benchmarks/peer_flower.py W1 FILE        (started by bench.py)
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import ray
import torch
import torch.nn.functional as F
from contender import stored
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain_pytorch import WORKLOADS
from turn_taking import next_round, say

NAME, FILE = sys.argv[1], Path(sys.argv[2])
W = WORKLOADS[NAME]
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    x, y = stored(FILE)[int(context.node_config["partition-id"])]  # an actor keeps all clients in memory
    model = W.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=W.lr)
    for _ in range(W.epochs):
        order = torch.randperm(len(y))
        for bx, by in zip(x[order].split(W.batch), y[order].split(W.batch), strict=True):
            if len(by) > 1:  # batch norm cannot learn from one sample
                optimiser.zero_grad()
                F.cross_entropy(model(bx), by).backward()
                optimiser.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    """FedAvg that measures the time from the choice of clients to the new model."""

    def configure_train(self, *args, **more):  # type: ignore[no-untyped-def]
        if next_round() is None:
            raise SystemExit
        self.begin = time.perf_counter()
        return super().configure_train(*args, **more)

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        replies = list(replies)
        samples = sum(int(m["num-examples"]) for r in replies for m in r.content.metric_records.values())
        result = super().aggregate_train(server_round, replies)
        say(seconds=time.perf_counter() - self.begin, samples=samples)
        return result


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Timed(fraction_train=W.join / W.clients, fraction_evaluate=0.0, min_available_nodes=W.clients)
    say(ready=True)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(W.model().state_dict()), num_rounds=10**6)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    # the simulation would wait for its own threads forever; Ray's processes end with this one
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=W.clients, backend_config=resources)
