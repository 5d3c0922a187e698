"""Tests of pFedMe."""

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Batch, Upload
from coterie.errors import CoterieError
from coterie.methods.pfedme import PFedMe
from support.toy import NORMS, begin, bind, clients, events, gradient, mlp, models, near, open_toy, play, same


def test_pfedme_update_by_hand():
    """Theta takes two inner steps from w, then w moves by eta * lam of the distance to theta."""
    method = bind(PFedMe, {"lam": 2.0, "inner_steps": 2, "personal_lr": 0.1, "eta": 0.25})
    w, ctx = method.ctx.w0, method.ctx
    batch = Batch(*clients().parts[0])
    params, extras = method.begin({}, w, clients().data(0), 1).model
    out = method.update(params, batch, extras, torch.Generator())
    one = T.add(w, gradient(ctx, w, batch.x, batch.y), -0.1)
    g = gradient(ctx, one, batch.x, batch.y)
    theta = {k: one[k] - 0.1 * (g[k] + 2.0 * (one[k] - w[k])) for k in w}
    assert near(T.tagged("t", out), theta)
    assert near(T.tagged("w", out), {k: w[k] - 0.25 * 2.0 * (w[k] - theta[k]) for k in w})


def test_pfedme_inner_steps_converge_to_the_prox_of_a_quadratic():
    class Quadratic(PFedMe):
        def loss(self, params, batch, extras):
            return 1.5 / 2 * sum((v - 3.0).square().sum() for v in params.values())

    method = bind(Quadratic, {"lam": 4.0, "inner_steps": 200, "personal_lr": 0.1, "eta": 0.1})
    params, extras = method.begin({}, method.ctx.w0, clients().data(0), 1).model
    out = method.update(params, Batch(*clients().parts[0]), extras, torch.Generator())
    closed = {k: (1.5 * 3.0 + 4.0 * v) / (1.5 + 4.0) for k, v in method.ctx.w0.items()}
    assert near(T.tagged("t", out), closed, atol=1e-5)
    # w takes a step of size eta along the gradient of the Moreau envelope
    assert near(T.tagged("w", out), {k: v - 0.1 * 4.0 * (v - closed[k]) for k, v in method.ctx.w0.items()}, atol=1e-5)


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
def test_pfedme_scores_the_stored_theta_not_the_uploaded_model(norm, tmp_path):
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


def test_pfedme_takes_the_given_number_of_steps_for_any_number_of_epochs(tmp_path):
    for epochs in (1, 7):
        loop = play(PFedMe, tmp_path, {"steps": 6}, epochs=epochs, rounds=1)
        assert events(loop)[0]["steps"] == 5 * 6


def test_pfedme_starts_theta_at_the_received_model_each_round():
    data = clients()
    method = bind(PFedMe, data=data)
    stale = {k: v + 5 for k, v in method.ctx.w0.items()}
    params, _ = method.begin({"theta": stale}, method.ctx.w0, data.data(0), 4).model
    assert same(T.tagged("t", params), method.ctx.w0)


@pytest.mark.parametrize("own", [{"personal_lr": 0.2}, {"eta": 0.15}])
def test_pfedme_refuses_step_sizes_that_diverge(own):
    with pytest.raises(CoterieError, match=f"{next(iter(own))} \\* lam"):
        bind(PFedMe, own)
