"""Methods with an update rule of their own: pFedMe, CGPFL, Per-FedAvg."""

import pytest
import torch
import torch.nn.functional as F

from coterie.core import tree as T
from coterie.core.method import Batch, Upload
from coterie.errors import CoterieError
from coterie.methods.cgpfl import CGPFL
from coterie.methods.fedavg import FedAvg
from coterie.methods.perfedavg import PerFedAvg, PerFedAvgHF, meta_gradient
from coterie.methods.pfedme import PFedMe
from coterie.parts.gradient import grad
from support.toy import Toy, W, begin, bind, clients, events, mlp, models, near, open_toy, play, same

NORMS = [False, True]


def weights(ctx, tree):
    return T.keep(tree, ctx.net.trainable.__contains__)


def slope(ctx, tree, batch):
    leaves = {k: v.clone().requires_grad_() for k, v in tree.items()}
    F.cross_entropy(ctx.forward(leaves, batch.x), batch.y).backward()
    return {k: v.grad for k, v in leaves.items()}


# ---- pFedMe ----------------------------------------------------------------------------------------------------------
def test_pfedme_update_by_hand():
    """Two inner steps on theta from w, then w moves eta * lam of the way."""
    method = bind(PFedMe, {"lam": 2.0, "inner_steps": 2, "personal_lr": 0.1, "eta": 0.25})
    w, ctx = method.ctx.w0, method.ctx
    batch = Batch(*clients().parts[0])
    params, extras = method.begin({}, w, clients().data(0), 1)
    out = method.update(params, batch, extras, torch.Generator())
    one = T.add(w, slope(ctx, w, batch), -0.1)
    g = slope(ctx, one, batch)
    theta = {k: one[k] - 0.1 * (g[k] + 2.0 * (one[k] - w[k])) for k in w}
    assert near(T.strip("t:", out), theta)
    assert near(T.strip("w:", out), {k: w[k] - 0.25 * 2.0 * (w[k] - theta[k]) for k in w})


def test_pfedme_inner_steps_converge_to_the_prox_of_a_quadratic():
    class Quadratic(PFedMe):
        def loss(self, params, batch, extras):
            return 1.5 / 2 * sum((v - 3.0).square().sum() for v in params.values())

    method = bind(Quadratic, {"lam": 4.0, "inner_steps": 200, "personal_lr": 0.1, "eta": 0.1})
    params, extras = method.begin({}, method.ctx.w0, clients().data(0), 1)
    out = method.update(params, Batch(*clients().parts[0]), extras, torch.Generator())
    closed = {k: (1.5 * 3.0 + 4.0 * v) / (1.5 + 4.0) for k, v in method.ctx.w0.items()}
    assert near(T.strip("t:", out), closed, atol=1e-5)
    # and so w takes a step of eta along the gradient of the Moreau envelope
    assert near(T.strip("w:", out), {k: v - 0.1 * 4.0 * (v - closed[k]) for k, v in method.ctx.w0.items()}, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("cls", "get"), [(PFedMe, lambda s: s["w"]), (CGPFL, lambda s: s["contexts"][0])])
def test_without_a_pull_the_shared_model_never_moves(cls, get, norm, tmp_path):
    loop = play(cls, tmp_path, {"lam": 0.0, "steps": 3}, model=mlp(norm))
    ctx = loop.method.ctx
    assert near(weights(ctx, get(loop.server)), weights(ctx, ctx.w0))  # the mean of equal models rounds
    assert not near(loop.runtime.states.get(0)["theta"], ctx.w0)


@pytest.mark.parametrize("norm", NORMS)
def test_pfedme_with_beta_zero_never_moves(norm, tmp_path):
    loop = play(PFedMe, tmp_path, {"beta": 0.0, "steps": 3}, model=mlp(norm))
    assert same(loop.server["w"], loop.method.ctx.w0)


def test_pfedme_server_moves_beta_of_the_way_to_the_mean_by_samples():
    method = bind(PFedMe, {"beta": 1.5})
    ones, twos = ({k: torch.full_like(v, c) for k, v in method.ctx.w0.items()} for c in (1.0, 2.0))
    after = method.aggregate({"w": method.ctx.w0}, [Upload(ones, {}, 0, 10), Upload(twos, {}, 1, 30)], 1)
    assert near(after["w"], {k: -0.5 * v + 1.5 * 1.75 for k, v in method.ctx.w0.items()})


@pytest.mark.parametrize("norm", NORMS)
def test_pfedme_stored_theta_is_not_the_uploaded_model_and_is_what_is_scored(norm, tmp_path):
    loop = begin(open_toy(PFedMe, tmp_path, {"steps": 3}, model=mlp(norm)))
    sent = []
    inner = loop.method.aggregate
    loop.method.aggregate = lambda server, up, t: (sent.extend(up), inner(server, up, t))[1]
    loop.step()
    loop.done = 1
    for u in sent:
        theta = loop.runtime.states.get(u.sender)["theta"]
        assert not torch.equal(theta["0.weight"], u.tree["0.weight"])
        assert not any(theta[k].data_ptr() == u.tree[k].data_ptr() for k in theta)
        assert same(models(loop)[u.sender], theta)
    assert not same(models(loop)[0], models(loop)[1])


def test_pfedme_with_eta_lambda_one_sends_theta(tmp_path):
    loop = begin(open_toy(PFedMe, tmp_path, {"lam": 4.0, "eta": 0.25, "steps": 1}))
    sent = {}
    inner = loop.method.aggregate
    loop.method.aggregate = lambda server, up, t: (sent.update({u.sender: u.tree for u in up}), inner(server, up, t))[1]
    loop.step()
    assert all(same(tree, loop.runtime.states.get(i)["theta"]) for i, tree in sent.items())


def test_pfedme_does_so_many_batches_whatever_the_epochs(tmp_path):
    for epochs in (1, 7):
        loop = play(PFedMe, tmp_path, {"steps": 6}, epochs=epochs, rounds=1)
        assert events(loop)[0]["steps"] == 5 * 6


def test_pfedme_starts_theta_at_the_received_model_each_round():
    data = clients()
    method = bind(PFedMe, data=data)
    stale = {k: v + 5 for k, v in method.ctx.w0.items()}
    params, _ = method.begin({"theta": stale}, method.ctx.w0, data.data(0), 4)
    assert same(T.strip("t:", params), method.ctx.w0)


@pytest.mark.parametrize("own", [{"personal_lr": 0.2}, {"eta": 0.15}])
def test_pfedme_steps_that_diverge_get_a_sentence(own):
    with pytest.raises(CoterieError, match=f"{next(iter(own))} \\* lam"):
        bind(PFedMe, own)


# ---- CGPFL -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("join", [1.0, 0.6])
def test_cgpfl_with_one_context_is_pfedme_to_the_bit(join, norm, tmp_path):
    own = {"lam": 5.0, "steps": 4, "inner_steps": 3, "personal_lr": 0.07}
    a = play(CGPFL, tmp_path, {**own, "groups": 1}, model=mlp(norm), join=join)
    b = play(PFedMe, tmp_path, own, model=mlp(norm), join=join, weighting="uniform")
    assert same(a.server["contexts"][0], b.server["w"])
    assert same(models(a), models(b))
    assert all((a.runtime.states.get(i) is None) == (b.runtime.states.get(i) is None) for i in range(5))


def test_cgpfl_clusters_partition_the_clients_it_has_met(tmp_path):
    loop = begin(open_toy(CGPFL, tmp_path, {"groups": 3, "steps": 3}, join=0.4))
    met: set[int] = set()
    for _ in range(1, 6):
        loop.step()
        met |= set(events(loop)[-1]["participants"])
        assert set(loop.server["cluster"]) == met == set(loop.server["bank"]["ids"])
        assert set(loop.server["cluster"].values()) <= {0, 1, 2}


def test_cgpfl_an_empty_context_keeps_its_model_and_labels_stay_aligned():
    method = bind(CGPFL, {"groups": 3, "beta": 1.0})
    w = method.ctx.w0
    steps = [0.0, 1.0, 5.0]
    contexts = [{k: v + s for k, v in w.items()} for s in steps]
    server = {**method.setup(), "contexts": contexts, "grouped": True}
    trees = [{k: v + s for k, v in w.items()} for s in (5.1, 0.1, 4.9)]
    after = method.aggregate(server, [Upload(t, {}, i, 1) for i, t in zip((7, 3, 9), trees, strict=True)], 2)
    assert after["cluster"] == {7: 2, 3: 0, 9: 2}
    assert same(after["contexts"][1], contexts[1])
    assert near(after["contexts"][2], {k: v + 5.0 for k, v in w.items()})
    assert near(after["contexts"][0], {k: v + 0.1 for k, v in w.items()})


def test_cgpfl_absent_clients_are_regrouped_but_do_not_vote():
    method = bind(CGPFL, {"groups": 2})
    w = method.ctx.w0
    server = method.setup()
    first = [Upload({k: v + s for k, v in w.items()}, {}, i, 1) for i, s in ((0, 0.0), (1, 0.2), (2, 3.0))]
    server = method.aggregate(server, first, 1)
    assert server["cluster"] == {0: 0, 1: 0, 2: 1}
    server = method.aggregate(server, [Upload({k: v + 0.4 for k, v in w.items()}, {}, 1, 1)], 2)
    assert server["cluster"] == {0: 0, 1: 0, 2: 1}
    assert near(server["contexts"][0], {k: v + 0.4 for k, v in w.items()})
    assert near(server["contexts"][1], {k: v + 3.0 for k, v in w.items()})


def test_cgpfl_separates_planted_groups(tmp_path):
    rng = torch.Generator().manual_seed(5)
    parts = []
    for i in range(6):
        x = torch.randn(20, 4, generator=rng)
        parts.append((x, (x[:, :3].argmax(1) + i % 2) % 3))
    loop = play(CGPFL, tmp_path, {"groups": 2}, data=Toy(parts, 3), rounds=3, batch=20)
    assert [loop.server["cluster"][i] for i in range(6)] == [0, 1, 0, 1, 0, 1]


# ---- Per-FedAvg ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
def test_per_fedavg_without_an_inner_step_is_fedavg_at_rate_b(norm, tmp_path):
    a = play(PerFedAvg, tmp_path, {"alpha": 0.0, "beta": 0.07}, model=mlp(norm), batch=100, epochs=2)
    b = play(FedAvg, tmp_path, model=mlp(norm), batch=100, epochs=2, lr=0.07, weighting="uniform")
    assert same(a.server["w"], b.server["w"])  # statistics of batch norm included


def test_per_fedavg_without_an_inner_step_descends_on_the_second_batch():
    method = bind(PerFedAvg, {"alpha": 0.0, "beta": 0.3})
    D, D2 = (Batch(*clients().parts[i]) for i in (0, 1))
    params, extras = method.begin({}, method.ctx.w0, clients().data(0), 1)
    out = method.outer(params, (D, D2), extras, torch.Generator())
    assert near(out, T.add(params, slope(method.ctx, params, D2), -0.3))


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
        adapted = T.add(ctx.w0, slope(ctx, ctx.w0, Batch(x, y)), -0.5)
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
        there = {**T.clone(params), **T.add(weights(ctx, params), inner, -0.5)}
        grad(lambda p: method.loss(p, D2, {}), there, sorted(ctx.net.trainable))
        out = method.outer(T.clone(ctx.w0), (D, D2, D3), {"b": 0.1}, torch.Generator())
    assert torch.equal(out["1.running_mean"], there["1.running_mean"])  # of the outer pass on D', once
    assert not torch.equal(out["1.running_mean"], ctx.w0["1.running_mean"])


# ---- gradients and bytes ---------------------------------------------------------------------------------------------
def test_grad_is_autograd_and_does_not_touch_its_tree():
    method = bind(PFedMe, model=mlp(True))
    params, batch = T.clone(method.ctx.w0), Batch(*clients().parts[0])
    with method.ctx.net.train_mode(), torch.no_grad():
        got = grad(lambda p: method.loss(p, batch, {}), params, ["0.weight", "3.bias"])
    assert list(got) == ["0.weight", "3.bias"] and not any(v.requires_grad for v in params.values())
    assert torch.equal(params["1.running_mean"], method.ctx.w0["1.running_mean"])  # its norm is not being trained
    leaves = {k: v.clone().requires_grad_(k in got) for k, v in params.items()}
    F.cross_entropy(method.ctx.forward(leaves, batch.x), batch.y).backward()
    assert all(torch.allclose(g, leaves[k].grad) for k, g in got.items())


@pytest.mark.parametrize("cls", [PFedMe, PerFedAvg, PerFedAvgHF, CGPFL])
def test_bytes_by_hand(cls, tmp_path):
    for e in events(play(cls, tmp_path, join=0.6)):
        each = {"model": 4 * W * len(e["participants"])}
        assert e["bytes"]["device-cloud"] == {"up": each, "down": each}
