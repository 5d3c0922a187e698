"""Tests of FedCP."""

import pytest
import torch
import torch.nn.functional as F

from coterie.methods.fedcp import FedCP
from coterie.parts.distill import mmd
from coterie.train.optimisers import Optimiser
from support.head_methods import D, batch_of, bound, gradients, noisy, opened, round_of, same, value


def moved(method, name, params, data):
    return not torch.equal(params[name], opened(method, data)[0][name])


@pytest.mark.parametrize("noise", [True, False])
def test_fedcp_shares_sum_to_one_and_only_noise_is_random(noise: bool) -> None:
    method, clients = bound(FedCP)
    params, extras = opened(method, clients[0])
    z = torch.randn(7, D)
    first, second = (method.shares(params, z, extras, noise) for _ in range(2))
    assert first.shape == (2, 7, D) and torch.allclose(first.sum(0), torch.ones(7, D))
    assert torch.equal(first, second) is not noise


def test_fedcp_adds_both_heads_on_their_shares() -> None:
    method, clients = bound(FedCP)
    params, extras = opened(method, clients[0])
    params = noisy(params, lambda k: k.startswith(("p:", "q:")))
    x = clients[0].train.x[:5]
    z = method.ctx.features(params, x)
    r, s = method.shares(params, z, extras, noise=False)
    w, b = "classifier.weight", "classifier.bias"
    expected = F.linear(r * z, params["p:" + w], params["p:" + b]) + F.linear(s * z, params[w], params[b])
    assert torch.allclose(method.predict(params, x, extras), expected, atol=1e-6)


def test_fedcp_received_head_and_body_are_frozen_under_adam() -> None:
    method, clients = bound(FedCP)
    params, extras, upload = round_of(method, clients[0], Optimiser("adam", weight_decay=0.1))
    for name in method.ctx.group("head"):
        assert not moved(method, name, params, clients[0]) and moved(method, "p:" + name, params, clients[0])
        assert torch.allclose(upload.tree[name], (params[name] + params["p:" + name]) / 2)
    assert same(extras["received"], opened(method, clients[0])[0])
    assert moved(method, "q:1.weight", params, clients[0]) and moved(method, "fc1.weight", params, clients[0])
    assert not any(name.startswith("p:") for name in upload.tree)


def test_fedcp_lambda_weighs_the_mmd_to_the_received_features() -> None:
    (method, clients), (plain, _) = bound(FedCP, lam=2.0), bound(FedCP, lam=0.0)
    params, extras = opened(method, clients[0])
    params, batch = noisy(params, lambda k: k == "fc2.weight"), batch_of(clients[0])
    z, frozen = (method.ctx.features(p, batch.x) for p in (params, extras["received"]))
    gap = value(method, params, batch, extras) - value(plain, params, batch, extras)
    assert torch.allclose(gap, 2 * mmd(z, frozen), atol=1e-5) and gap > 0
    assert mmd(z, z) == 0
    with_, without = (gradients(m, params, batch, extras) for m in (method, plain))
    assert not torch.equal(with_["fc2.weight"], without["fc2.weight"])
    assert torch.equal(with_["p:classifier.weight"], without["p:classifier.weight"])


def test_fedcp_context_follows_the_clients_own_head() -> None:
    method, clients = bound(FedCP)
    state, down = method.init_client(clients[0]), method.down(method.setup(), [0], 1).to(0)
    state = {"own": noisy(state["own"], lambda k: True)}
    context = method.personal(state, down, clients[0])[1]["context"]
    assert torch.allclose(context, F.normalize(state["own"]["p:classifier.weight"].sum(0), dim=0))
