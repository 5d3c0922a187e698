"""FedCP, FedRoD, GPFL, APFL: two heads, two routes, two models."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coterie.core import tree as T
from coterie.core.method import Batch, cross_entropy
from coterie.methods.apfl import ALPHA, APFL
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedcp import FedCP
from coterie.methods.fedrod import FedRoD
from coterie.methods.gpfl import CLASSES, GPFL
from coterie.methods.local import Local
from coterie.parts.distill import mmd
from coterie.train.optimisers import Optimiser
from support.head_methods import (
    batch_of,
    bound,
    declared,
    gradients,
    noisy,
    opened,
    play,
    round_of,
    same,
    scalars,
    value,
)
from support.toy import handed

D, K = 16, 10  # of the battery's model


def moved(method, name, params, data):
    return not torch.equal(params[name], opened(method, data)[0][name])


# ---- FedCP -----------------------------------------------------------------------------------------------------------
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


# ---- FedRoD ----------------------------------------------------------------------------------------------------------
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
    own = T.strip("p:", method.init_client(clients[0])["own"])
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
    # the global model is untouched by it
    plain = gradients(bound(FedRoD)[0], opened(bound(FedRoD)[0], clients[0])[0], batch_of(clients[0]), extras)
    assert torch.equal(plain["fc1.weight"], g["fc1.weight"])


# ---- GPFL ------------------------------------------------------------------------------------------------------------
def test_gpfl_lambda_weighs_the_unsquared_norm_of_the_whole_batch() -> None:
    (method, clients), (plain, _) = bound(GPFL, lam=0.3), bound(GPFL, lam=0.0)
    params, extras = opened(method, clients[0])
    batch = batch_of(clients[0])
    common = method.valve(params, method.ctx.features(params, batch.x), extras["common"])
    norm = (common - extras["classes"][batch.y]).square().sum().sqrt()
    gap = value(method, params, batch, extras) - value(plain, params, batch, extras)
    assert torch.allclose(gap, 0.3 * norm, atol=1e-4)
    with_, without = (gradients(m, params, batch, extras) for m in (method, plain))
    assert torch.equal(with_[CLASSES], without[CLASSES])  # the received embeddings are constants in that term
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
    down = {**server["w"], CLASSES: C}
    _, extras = method.begin(method.init_client(clients[0]), down, clients[0], 2)
    shares = clients[0].label_counts / len(clients[0].train)
    assert torch.allclose(extras["common"], C.mean(0)) and torch.allclose(extras["own"], shares @ C, atol=1e-6)


def test_gpfl_loss_is_the_personal_route_plus_the_cosine_route() -> None:
    method, clients = bound(GPFL, lam=0.0)
    params, extras = opened(method, clients[0])
    batch = batch_of(clients[0])
    z = method.ctx.features(params, batch.x)
    cosine = F.cosine_similarity(method.valve(params, z, extras["common"])[:, None], params[CLASSES][None], dim=-1)
    own = cross_entropy(method.predict(params, batch.x, extras), batch)
    assert torch.allclose(value(method, params, batch, extras), own + F.cross_entropy(cosine, batch.y), atol=1e-5)


def test_gpfl_weight_decay_acts_on_embeddings_and_valve_only() -> None:
    run = {"batch": 1000, "epochs": 1}  # one step
    (with_, clients), (without, _) = bound(GPFL, run, mu=0.5), bound(GPFL, run, mu=0.0)
    start = opened(with_, clients[0])[0]
    a, b = (round_of(m, clients[0], Optimiser(weight_decay=0.2))[0] for m in (with_, without))
    for name, v in a.items():
        decay = 0.1 * 0.5 * start[name] if name.startswith("x:") else torch.zeros_like(v)
        assert torch.allclose(b[name] - v, decay, atol=1e-5), name


# ---- APFL ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own", [{"alpha": 0.3, "adaptive": False}, {}], ids=["fixed", "adaptive"])
def test_apfl_global_model_is_fedavg_whatever_alpha(tmp_path: Path, own: dict[str, float]) -> None:
    ours, fedavg = play(APFL, tmp_path, **own), play(FedAvg, tmp_path)
    assert same(ours.server["w"], fedavg.server["w"])


def test_apfl_with_alpha_1_is_local_only(tmp_path: Path) -> None:
    ours, local = play(APFL, tmp_path, alpha=1.0, adaptive=False), play(Local, tmp_path)
    pairs = [(ours.runtime.states.get(i), local.runtime.states.get(i)) for i in local.method.ctx.clients]
    assert any(b is not None for _, b in pairs)
    assert all(same(a["v"], b["own"]) for a, b in pairs if b is not None)


def test_apfl_with_alpha_0_leaves_v_alone_and_predicts_as_the_global_model(tmp_path: Path) -> None:
    run = {"weight_decay": 0.1, "momentum": 0.9, "join": 1.0}
    loop = play(APFL, tmp_path, run, alpha=0.0, adaptive=False)
    state, data = loop.runtime.states.get(0), bound(APFL)[1][0]
    assert same(state["v"], loop.method.ctx.w0)
    params, extras = loop.method.personal(state, handed(loop, 0), data)
    expected = loop.method.ctx.forward(loop.server["w"], data.train.x)
    assert torch.equal(loop.method.predict(params, data.train.x, extras), expected)


def test_apfl_v_learns_alpha_times_the_gradient_at_the_mixture_and_w_only_its_own() -> None:
    method, clients = bound(APFL, alpha=0.3, adaptive=False)
    params, extras = opened(method, clients[0])
    params, batch = noisy(params, lambda k: k == "p:fc2.weight"), batch_of(clients[0])
    got = gradients(method, params, batch, extras)
    v, w = ({k: t.clone().requires_grad_() for k, t in T.strip(m, params).items()} for m in ("p:", "g:"))
    with method.ctx.net.train_mode():
        stats = method.ctx.group("bn_stats")
        v, w = ({k: t.detach() if k in stats else t for k, t in m.items()} for m in (v, w))
        lv, lw = method.ctx.forward(v, batch.x), method.ctx.forward(w, batch.x)
    outer = torch.autograd.grad(F.cross_entropy(mix := 0.3 * lv + 0.7 * lw, batch.y), mix, retain_graph=True)[0]
    expected = torch.autograd.grad(lv, v["fc1.weight"], 0.3 * outer)[0]
    assert torch.allclose(got["p:fc1.weight"], expected, atol=1e-6) and expected.any()
    own = torch.autograd.grad(F.cross_entropy(lw, batch.y), w["fc1.weight"])[0]
    assert torch.equal(got["g:fc1.weight"], own)


def test_apfl_alpha_takes_one_step_down_its_gradient_and_stays_in_its_interval() -> None:
    method, clients = bound(APFL)
    params, extras = opened(method, clients[0])
    params, batch = noisy(params, lambda k: k == "p:classifier.weight"), batch_of(clients[0])
    lv, lw = (method.ctx.forward(T.strip(m, params), batch.x) for m in ("p:", "g:"))
    losses = [F.cross_entropy(a * lv.double() + (1 - a) * lw.double(), batch.y) for a in (0.501, 0.499)]
    slope = float(losses[0] - losses[1]) / 0.002
    new = method.weigh(params, batch, extras, torch.Generator())
    assert float(new[ALPHA]) == pytest.approx(0.5 - 0.1 * (slope + 0.02 * 0.5), abs=1e-4) and abs(slope) > 0.01
    for lr in (1e6, -1e6):
        assert float(method.weigh(params, batch, {"lr": lr}, torch.Generator())[ALPHA]) in (0.0, 1.0)
    assert all(torch.equal(v, params[k]) for k, v in new.items() if k != ALPHA)


def test_apfl_alpha_moves_once_a_round_on_the_first_batch() -> None:
    method, clients = bound(APFL, {"epochs": 2, "batch": 8})
    seen: list[Batch] = []
    weigh = method.weigh
    method.weigh = lambda p, b, e, r: (seen.append(b), weigh(p, b, e, r))[1]
    order = []
    loss = method.loss
    method.loss = lambda p, b, e: (order.append(b), loss(p, b, e))[1]
    round_of(method, clients[0])
    assert len(seen) == 1 and torch.equal(seen[0].x, order[0].x) and len(order) > 2


# ---- ledger ----------------------------------------------------------------------------------------------------------
def test_declared_bytes_of_methods_with_a_second_head_or_model_by_hand() -> None:
    for cls, size in (
        (FedCP, lambda m: scalars(m, "all") + 2 * D * D + 6 * D),
        (FedRoD, lambda m: scalars(m, "all")),
        (GPFL, lambda m: scalars(m, "body") + K * D + 2 * (D * D + 3 * D)),
        (APFL, lambda m: scalars(m, "all")),
    ):
        method, _ = bound(cls)
        assert declared(method, 4) == (4 * size(method), 4 * size(method)), cls
