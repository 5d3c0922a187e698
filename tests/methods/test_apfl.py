"""Tests of APFL."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coterie.core import tree as T
from coterie.core.method import Batch
from coterie.methods.apfl import ALPHA, APFL
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from support.head_methods import batch_of, bound, gradients, noisy, opened, play, round_of, same
from support.toy import handed


@pytest.mark.parametrize("own", [{"alpha": 0.3, "adaptive": False}, {}], ids=["fixed", "adaptive"])
def test_apfl_global_model_is_that_of_fedavg_for_any_alpha(tmp_path: Path, own: dict[str, float]) -> None:
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
    v, w = ({k: t.clone().requires_grad_() for k, t in T.tagged(m, params).items()} for m in ("p", "g"))
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
    lv, lw = (method.ctx.forward(T.tagged(m, params), batch.x) for m in ("p", "g"))
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
