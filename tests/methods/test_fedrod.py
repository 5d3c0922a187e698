"""Tests of FedRoD."""

from pathlib import Path

import torch
import torch.nn.functional as F

from coterie.core import tree as T
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedrod import FedRoD
from support.head_methods import K, batch_of, bound, gradients, noisy, opened, play, same, value


def test_fedrod_with_gamma_0_has_fedavg_as_its_global_model(tmp_path: Path) -> None:
    ours, fedavg = play(FedRoD, tmp_path, gamma=0.0), play(FedAvg, tmp_path)
    assert same(ours.server["w"], fedavg.server["w"])
    assert not same(play(FedRoD, tmp_path).server["w"], fedavg.server["w"])


def test_fedrod_nothing_flows_back_from_the_personal_head() -> None:
    method, clients = bound(FedRoD)
    params, extras = opened(method, clients[0])
    batch = batch_of(clients[0])
    one, two = (gradients(method, noisy(params, lambda k: k[:2] == "p:", s), batch, extras) for s in (1, 2))
    for name, g in one.items():
        assert torch.equal(g, two[name]) is not name.startswith("p:"), name


def test_fedrod_losses_are_the_balanced_softmax_and_the_risk_of_the_sum() -> None:
    method, clients = bound(FedRoD, gamma=0.5)
    params, extras = opened(method, clients[0])
    params, batch = noisy(params, lambda k: k.startswith("p:")), batch_of(clients[0])
    g, z = method.ctx.net.both(params, batch.x)
    p = F.linear(z, params["p:classifier.weight"], params["p:classifier.bias"])
    counts = clients[0].label_counts.float().clamp(min=1e-12)
    expected = F.cross_entropy(g + 0.5 * counts.log(), batch.y) + F.cross_entropy(g + p, batch.y)
    assert torch.allclose(value(method, params, batch, extras), expected, atol=1e-5) and expected.isfinite()
    assert torch.allclose(method.predict(params, batch.x, extras), g + p, atol=1e-5)
    even = {"counts": torch.full((K,), 7.0)}
    same_as_ce = F.cross_entropy(g, batch.y) + F.cross_entropy(g + p, batch.y)
    assert torch.allclose(value(method, params, batch, even), same_as_ce, atol=1e-5)


def test_fedrod_global_model_scores_the_generic_head_and_the_second_starts_as_its_copy() -> None:
    method, clients = bound(FedRoD)
    own = T.tagged("p", method.init_client(clients[0])["own"])
    assert same(own, {k: method.ctx.w0[k] for k in own}) and own.keys() == method.ctx.group("head")
    assert same(method.global_model(method.setup()), method.ctx.w0)


def test_fedrod_hyper_network_makes_heads_from_label_shares_and_is_averaged(tmp_path: Path) -> None:
    loop = play(FedRoD, tmp_path, {"join": 1.0}, hyper=True)
    assert not same(loop.server["w"], loop.method.setup()["w"])
    assert loop.runtime.states.get(0) == {"own": {}}
    method, clients = bound(FedRoD, hyper=True)
    params, extras = opened(method, clients[0])
    g = gradients(method, params, batch_of(clients[0]), extras)
    assert all(g[k] is not None and g[k].any() for k in params if k.startswith("h:"))
    x = clients[0].train.x[:5]
    other = {"counts": clients[1].label_counts.float()}
    assert not torch.allclose(method.predict(params, x, extras), method.predict(params, x, other))
    # the global model does not depend on it
    plain = gradients(bound(FedRoD)[0], opened(bound(FedRoD)[0], clients[0])[0], batch_of(clients[0]), extras)
    assert torch.equal(plain["fc1.weight"], g["fc1.weight"])
