"""Tests of FedAvg."""

import pytest
import torch
from torch import nn

from coterie.core import tree as T
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from support.toy import NORMS, OPTIMISERS, Toy, begin, bind, clients, events, gradient, mlp, near, open_toy, play, same


def line() -> nn.Module:
    """Return a model of two inputs and two classes with zero weights: every probability is 1/2."""
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def pair() -> Toy:
    """Return two clients: one sample (1, 0) of class 0, and three samples (0, 2) of class 1."""
    one, three = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]).repeat(3, 1)
    return Toy([(one, torch.tensor([0])), (three, torch.tensor([1, 1, 1]))], 2)


# One step of rate 1 from zero: the gradient of the cross-entropy is (p - onehot) x, with p = (1/2, 1/2).
STEP = [
    {"weight": torch.tensor([[0.5, 0.0], [-0.5, 0.0]]), "bias": torch.tensor([0.5, -0.5])},
    {"weight": torch.tensor([[0.0, -1.0], [0.0, 1.0]]), "bias": torch.tensor([-0.5, 0.5])},
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("run", OPTIMISERS)
def test_one_client_fedavg_is_local(run, norm, tmp_path):
    data = clients(1)
    a, b = (play(cls, tmp_path, data=data, model=mlp(norm), **run) for cls in (FedAvg, Local))
    assert same(a.server["w"], b.runtime.states.get(0)["own"])


def test_fedavg_by_hand(tmp_path):
    """The mean weighs the clients by samples, 1 to 3, or equally with weighting = uniform."""
    for weighting, share in ((None, (0.25, 0.75)), ("uniform", (0.5, 0.5))):
        loop = play(FedAvg, tmp_path, model=line(), data=pair(), rounds=1, lr=1.0, weighting=weighting)
        expected = {k: share[0] * STEP[0][k] + share[1] * STEP[1][k] for k in ("weight", "bias")}
        assert near(loop.server["w"], expected)


def test_fedavg_with_one_full_batch_step_is_gradient_descent_on_the_mean_loss(tmp_path):
    data = clients(sizes=(8,))
    loop = play(FedAvg, tmp_path, data=data, rounds=1, batch=8)
    x, y = (torch.cat(parts) for parts in zip(*data.parts, strict=True))
    ctx = loop.method.ctx
    assert near(loop.server["w"], T.add(ctx.w0, gradient(ctx, ctx.w0, x, y), -0.1))


def test_fedavg_of_identical_clients_is_the_upload_of_each(tmp_path):
    data = Toy([clients().parts[0]] * 4, 3)
    loop = play(FedAvg, tmp_path, data=data, rounds=1, batch=100, model=mlp(True))
    alone = play(FedAvg, tmp_path, data=Toy(data.parts[:1], 3), rounds=1, batch=100, model=mlp(True))
    assert near(loop.server["w"], alone.server["w"], atol=1e-6)


def test_fedavg_takes_the_mean_of_the_sampled_only(tmp_path):
    loop = begin(open_toy(FedAvg, tmp_path, join=0.4))
    loop.step()
    asked = events(loop)[0]["participants"]
    assert len(asked) == 2
    data = clients()
    alone = play(FedAvg, tmp_path, data=data, join=0.4, rounds=1)
    other = Toy([p if i in asked else (p[0] * 9, p[1]) for i, p in enumerate(data.parts)], 3)
    assert same(alone.server["w"], loop.server["w"])
    assert same(play(FedAvg, tmp_path, data=other, join=0.4, rounds=1).server["w"], loop.server["w"])


def test_the_counter_of_batch_norm_neither_travels_nor_is_averaged():
    method = bind(FedAvg, model=mlp(True))
    assert "1.num_batches_tracked" not in method.ctx.w0 and "1.running_mean" in method.setup()["w"]


def test_batch_norm_is_found_by_type_not_by_name(tmp_path):
    module = nn.Sequential()
    module.add_module("bn_is_a_linear_layer", nn.Linear(4, 6))
    module.add_module("downsample", nn.Sequential(nn.Identity(), nn.BatchNorm1d(6)))
    module.add_module("out", nn.Linear(6, 3))
    loop = play(FedAvg, tmp_path, model=module, bn_stats="local")
    stats = {"downsample.1.running_mean", "downsample.1.running_var"}
    assert loop.method.ctx.group("bn_stats") == stats
    assert loop.method.ctx.w0.keys() - loop.server["w"].keys() == stats == loop.runtime.states.get(0)["own"].keys()
