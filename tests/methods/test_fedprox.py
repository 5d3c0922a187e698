"""Tests of FedProx."""

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Batch
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedprox import FedProx
from support.toy import NORMS, OPTIMISERS, bind, clients, gradient, mlp, near, play, same


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("run", OPTIMISERS)
def test_fedprox_with_zero_mu_is_fedavg(run, norm, tmp_path):
    a = play(FedProx, tmp_path, {"mu": 0.0}, model=mlp(norm), join=0.6, **run)
    b = play(FedAvg, tmp_path, model=mlp(norm), join=0.6, **run)
    assert same(a.server["w"], b.server["w"])


def test_fedprox_by_hand(tmp_path):
    """Two full-batch steps on one client; the anchor is the received model in both."""
    data = clients(1)
    loop = play(FedProx, tmp_path, {"mu": 2.0}, data=data, rounds=1, epochs=2, batch=100)
    ctx, (x, y) = loop.method.ctx, data.parts[0]
    one = T.add(ctx.w0, gradient(ctx, ctx.w0, x, y), -0.1)
    g = gradient(ctx, one, x, y)
    assert near(loop.server["w"], {k: one[k] - 0.1 * (g[k] + 2.0 * (one[k] - ctx.w0[k])) for k in one})


@pytest.mark.parametrize("norm", NORMS)
def test_fedprox_penalty_has_the_gradient_mu_delta_and_spares_statistics(norm):
    method = bind(FedProx, {"mu": 3.0}, model=mlp(norm))
    ctx, (x, y) = method.ctx, clients().parts[0]
    there = {k: v + 0.01 * (i + 1) for i, (k, v) in enumerate(ctx.w0.items())}
    names = sorted(ctx.net.trainable)
    leaves = {k: v.clone().requires_grad_(k in ctx.net.trainable) for k, v in there.items()}
    loss = method.phases(1)[0].loss
    total = loss(leaves, Batch(x, y), {"anchor": ctx.w0})
    got = dict(zip(names, torch.autograd.grad(total, [leaves[k] for k in names]), strict=True))
    plain = gradient(ctx, there, x, y)
    assert near(got, {k: plain[k] + 3.0 * (there[k] - ctx.w0[k]) for k in names}, atol=1e-5)
    if norm:
        other = {**ctx.w0, "1.running_mean": ctx.w0["1.running_mean"] + 7}
        assert torch.equal(total, loss(leaves, Batch(x, y), {"anchor": other}))


def test_fedprox_with_a_very_large_mu_stays_at_the_received_model(tmp_path):
    start = mlp().state_dict()
    ends = [play(FedProx, tmp_path, {"mu": mu}, rounds=1, epochs=5, lr=1e-4).server["w"] for mu in (0.0, 9000.0)]
    moved = [T.sqdist(w, start, w) for w in ends]
    assert moved[1] < 0.05 * moved[0]
