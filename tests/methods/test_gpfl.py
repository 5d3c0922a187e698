"""Tests of GPFL."""

import torch
import torch.nn.functional as F

from coterie.methods.gpfl import CLASS_VECTORS, GPFL
from coterie.train.optimisers import Optimiser
from support.head_methods import D, K, batch_of, bound, gradients, opened, round_of, value


def test_gpfl_lambda_weighs_the_unsquared_norm_of_the_whole_batch() -> None:
    (method, clients), (plain, _) = bound(GPFL, lam=0.3), bound(GPFL, lam=0.0)
    params, extras = opened(method, clients[0])
    batch = batch_of(clients[0])
    common = method.valve(params, method.ctx.features(params, batch.x), extras["common"])
    norm = (common - extras["classes"][batch.y]).square().sum().sqrt()
    gap = value(method, params, batch, extras) - value(plain, params, batch, extras)
    assert torch.allclose(gap, 0.3 * norm, atol=1e-4)
    with_, without = (gradients(m, params, batch, extras) for m in (method, plain))
    assert torch.equal(
        with_[CLASS_VECTORS], without[CLASS_VECTORS]
    )  # the term treats the received embeddings as constants
    assert not torch.equal(with_["x:gamma.weight"], without["x:gamma.weight"])
    assert torch.equal(with_["classifier.weight"], without["classifier.weight"])


def test_gpfl_with_even_labels_both_routes_coincide() -> None:
    method, clients = bound(GPFL)
    _, extras = opened(method, clients[0])
    assert not torch.allclose(extras["own"], extras["common"])
    data = clients[0]
    even = type(data)(0, type(data.train)(data.train.x[:K], torch.arange(K)), data.val, K)
    params, extras = opened(method, even)
    assert torch.allclose(extras["own"], extras["common"], atol=1e-6)
    z = torch.randn(4, D)
    routes = [method.valve(params, z, extras[c]) for c in ("own", "common")]
    assert torch.allclose(*routes, atol=1e-5)


def test_gpfl_conditions_come_from_the_embeddings_just_received() -> None:
    method, clients = bound(GPFL)
    server = method.setup()
    C = torch.randn(K, D)
    down = {**server["w"], CLASS_VECTORS: C}
    _, extras = method.begin(method.init_client(clients[0]), down, clients[0], 2).model
    shares = clients[0].label_counts / len(clients[0].train)
    assert torch.allclose(extras["common"], C.mean(0)) and torch.allclose(extras["own"], shares @ C, atol=1e-6)


def test_gpfl_loss_is_the_personal_route_plus_the_cosine_route() -> None:
    method, clients = bound(GPFL, lam=0.0)
    params, extras = opened(method, clients[0])
    batch = batch_of(clients[0])
    z = method.ctx.features(params, batch.x)
    cosine = F.cosine_similarity(
        method.valve(params, z, extras["common"])[:, None], params[CLASS_VECTORS][None], dim=-1
    )
    own = F.cross_entropy(method.predict(params, batch.x, extras), batch.y)
    assert torch.allclose(value(method, params, batch, extras), own + F.cross_entropy(cosine, batch.y), atol=1e-5)


def test_gpfl_weight_decay_acts_on_embeddings_and_valve_only() -> None:
    run = {"batch": 1000, "epochs": 1}  # one step
    (with_, clients), (without, _) = bound(GPFL, run, mu=0.5), bound(GPFL, run, mu=0.0)
    start = opened(with_, clients[0])[0]
    a, b = (round_of(m, clients[0], Optimiser(weight_decay=0.2))[0] for m in (with_, without))
    for name, v in a.items():
        decay = 0.1 * 0.5 * start[name] if name.startswith("x:") else torch.zeros_like(v)
        assert torch.allclose(b[name] - v, decay, atol=1e-5), name
