"""Tests of Per-FedAvg."""

import pytest
import torch
import torch.nn.functional as F

from coterie.core import tree as T
from coterie.core.method import Batch
from coterie.methods.fedavg import FedAvg
from coterie.methods.perfedavg import PerFedAvg, PerFedAvgHF, meta_gradient
from coterie.parts.gradient import grad
from support.toy import NORMS, begin, bind, clients, events, gradient, mlp, near, open_toy, play, same, trainable


@pytest.mark.parametrize("norm", NORMS)
def test_per_fedavg_without_an_inner_step_is_fedavg_at_rate_b(norm, tmp_path):
    a = play(PerFedAvg, tmp_path, {"alpha": 0.0, "beta": 0.07}, model=mlp(norm), batch=100, epochs=2)
    b = play(FedAvg, tmp_path, model=mlp(norm), batch=100, epochs=2, lr=0.07, weighting="uniform")
    assert same(a.server["w"], b.server["w"])  # statistics of batch norm included


def test_per_fedavg_without_an_inner_step_descends_on_the_second_batch():
    method = bind(PerFedAvg, {"alpha": 0.0, "beta": 0.3})
    D, D2 = (Batch(*clients().parts[i]) for i in (0, 1))
    params, extras = method.begin({}, method.ctx.w0, clients().data(0), 1).model
    out = method.outer(params, (D, D2), extras, torch.Generator())
    assert near(out, T.add(params, gradient(method.ctx, params, D2.x, D2.y), -0.3))


def test_per_fedavg_inner_and_outer_rates_are_not_swapped():
    """f(x) = k/2 x^2: FO gives x - b k (1 - a k) x, HF one more factor (1 - a k)."""
    a, b, k, x = 0.1, 0.3, 2.0, 5.0
    losses = [lambda p: k / 2 * p["x"].square().sum()] * 3
    w = {"x": torch.tensor([x], dtype=torch.float64)}
    first = meta_gradient(losses[:2], w, ["x"], a, 1e-3)["x"].item()
    second = meta_gradient(losses, w, ["x"], a, 1e-3)["x"].item()
    assert x - b * first == pytest.approx(x - b * k * (1 - a * k) * x, abs=1e-9)
    assert x - b * second == pytest.approx(x - b * k * (1 - a * k) ** 2 * x, abs=1e-6)


def test_per_fedavg_hf_is_the_exact_meta_gradient_of_a_quadratic():
    rng = torch.Generator().manual_seed(3)
    root = torch.randn(6, 6, generator=rng, dtype=torch.float64)
    A, c = root @ root.T, torch.randn(6, generator=rng, dtype=torch.float64)
    w = {"x": torch.randn(6, generator=rng, dtype=torch.float64)}
    losses = [lambda p: 0.5 * p["x"] @ A @ p["x"] + c @ p["x"]] * 3
    a = 0.05
    g = A @ (w["x"] - a * (A @ w["x"] + c)) + c
    exact = (torch.eye(6, dtype=torch.float64) - a * A) @ g
    assert torch.allclose(meta_gradient(losses[:2], w, ["x"], a, 1e-3)["x"], g)
    assert torch.allclose(meta_gradient(losses, w, ["x"], a, 1e-3)["x"], exact, rtol=1e-6)


def test_per_fedavg_hf_and_fo_agree_as_the_inner_rate_vanishes():
    method = bind(PerFedAvgHF)
    batch = Batch(*clients().parts[3])
    losses = [lambda p: method.loss(p, batch, {})] * 3
    gaps = []
    for a in (0.1, 0.01, 0.001):
        fo, hf = (meta_gradient(losses[:n], method.ctx.w0, method.ctx.w0, a, 1e-3) for n in (2, 3))
        gaps.append(float(T.sqdist(fo, hf, fo).sqrt()))
    assert gaps[0] > 1e-3 and gaps[1] < 0.2 * gaps[0] and gaps[2] < 0.02 * gaps[0]


def test_per_fedavg_draws_two_batches_per_step_and_three_with_the_hessian(tmp_path):
    data = clients(1, sizes=(24,))
    steps = {cls: events(play(cls, tmp_path, data=data, rounds=1))[0]["steps"] for cls in (PerFedAvg, PerFedAvgHF)}
    assert steps == {PerFedAvg: 3, PerFedAvgHF: 2}  # 6 batches of 4


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cls", [PerFedAvg, PerFedAvgHF])
def test_per_fedavg_evaluation_leaves_the_model_alone_and_scores_an_adapted_copy(cls, norm, tmp_path):
    loop = begin(open_toy(cls, tmp_path, {"alpha": 0.5}, model=mlp(norm)))
    loop.step()
    before = T.clone(loop.server["w"])
    result = loop.evaluate()
    assert same(before, loop.server["w"])
    assert (result.loss["adapted/test"] < result.loss["personal/test"]).all()
    assert (result.loss["personal/test"] == result.loss["global/test"]).all()
    assert all(not loop.runtime.states.get(i) for i in range(5))


def test_per_fedavg_adapts_by_one_step_of_plain_descent_on_one_batch(tmp_path):
    loop = begin(open_toy(PerFedAvg, tmp_path, {"alpha": 0.5}, batch=100, optimizer="adam"))
    result = loop.evaluate()
    ctx = loop.method.ctx
    for i, (x, y) in enumerate(clients().parts):
        adapted = T.add(ctx.w0, gradient(ctx, ctx.w0, x, y), -0.5)
        expected = F.cross_entropy(ctx.forward(adapted, x), y, reduction="sum")
        assert result.loss["adapted/test"][i] == pytest.approx(float(expected), rel=1e-5)


def test_per_fedavg_inner_step_and_hessian_leave_batch_norm_statistics_alone():
    method = bind(PerFedAvgHF, {"alpha": 0.5}, model=mlp(True))
    ctx = method.ctx
    D, D2, D3 = (Batch(*clients().parts[i]) for i in (0, 1, 2))
    params = T.clone(ctx.w0)
    with ctx.net.train_mode():
        adapted = method.inner(params, D, {}, torch.Generator())
        assert torch.equal(adapted["1.running_mean"], ctx.w0["1.running_mean"])
        assert torch.equal(adapted["1.running_var"], ctx.w0["1.running_var"])
        inner = grad(lambda p: method.loss(p, D, {}), T.clone(params), sorted(ctx.net.trainable))
        there = {**T.clone(params), **T.add(trainable(ctx, params), inner, -0.5)}
        grad(lambda p: method.loss(p, D2, {}), there, sorted(ctx.net.trainable))
        out = method.outer(T.clone(ctx.w0), (D, D2, D3), {"b": 0.1}, torch.Generator())
    assert torch.equal(out["1.running_mean"], there["1.running_mean"])  # updated once, by the outer pass on D'
    assert not torch.equal(out["1.running_mean"], ctx.w0["1.running_mean"])
