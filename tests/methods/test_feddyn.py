"""Tests of FedDyn."""

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Batch
from coterie.errors import CoterieError
from coterie.methods import build_method
from support.short_runs import CLIENTS, bound, jittered, near, play, same, session, size, state, traffic, upload, watch


@pytest.mark.parametrize("clip", [None, 10.0])
def test_feddyn_first_uploads_are_those_of_fedprox(clip: float | None) -> None:
    _, dyn = watch(session("feddyn", own={"alpha": 0.3, "clip": clip}, rounds=1))
    _, prox = watch(session("fedprox", own={"mu": 0.3}, rounds=1))
    assert all(same(a.tree, b.tree) for a, b in zip(dyn[0], prox[0], strict=True))


def test_feddyn_server_dual_is_the_mean_of_all_client_duals_under_partial_participation() -> None:
    loop = play("feddyn", rounds=4, join=0.4)
    duals = [state(loop, i)["h"] for i in CLIENTS if state(loop, i) is not None]
    for k, hbar in loop.server["hbar"].items():
        assert torch.allclose(hbar, sum(h[k] for h in duals) / 5, atol=1e-6), k
        assert bool(hbar.abs().sum() > 0), k


def test_feddyn_sends_average_plus_dual_and_scores_the_average() -> None:
    loop = play("feddyn")
    method, server = loop.method, loop.server
    for k, h in server["hbar"].items():
        assert torch.equal(server["w"][k], server["avg"][k] + h)
    data = session("feddyn").federation.data(0)
    sent, handed = method.down(server, [0], 4).to(0), method.deliver(server, [0], 4).to(0)
    assert same(sent, server["w"])
    assert same(method.personal(state(loop, 0) or method.init_client(data), handed, data)[0], server["avg"])
    assert same(method.begin(method.init_client(data), handed, data, 4).model[0], server["w"])
    assert method.global_model(server) is server["avg"]


def test_feddyn_does_not_move_when_no_client_moved() -> None:
    method = bound("feddyn")
    server = method.setup()
    after = method.aggregate(server, [upload(method, i, server["w"]) for i in range(3)], 1)
    assert same(after["w"], server["w"])


def test_feddyn_penalty_has_the_gradient_of_the_paper() -> None:
    s = session("feddyn", own={"alpha": 0.5})
    method, data = s.method, s.federation.data(0)
    h = {k: torch.full_like(v, 0.25) for k, v in method.init_client(data)["h"].items()}
    start, extras = method.begin({"h": h}, method.ctx.w0, data, 1).model
    there = {k: (v + 0.125).requires_grad_(k in h) for k, v in start.items()}
    batch = Batch(data.train.x[:8], data.train.y[:8])
    names = sorted(h)
    with_penalty, without = (
        torch.autograd.grad(loss, [there[k] for k in names])
        for loss in (method.loss(there, batch, extras), method.ctx.ce(there, batch))
    )
    for k, a, b in zip(names, with_penalty, without, strict=True):
        assert torch.allclose(a - b, torch.full_like(a, 0.5 * 0.25 + 0.5 * 0.125), atol=1e-5), k


def test_feddyn_weighs_participants_equally_and_divides_the_dual_by_all_clients() -> None:
    method = bound("feddyn")
    server = method.setup()
    models = [jittered(server["w"], i) for i in (1, 2)]
    after = method.aggregate(server, [upload(method, 0, models[0], 90), upload(method, 1, models[1], 10)], 1)
    assert near(after["avg"], T.mean(models))
    moved = T.sub(T.mean(models), server["w"])
    assert near(after["hbar"], {k: moved[k] * 2 / 5 for k in after["hbar"]})


@pytest.mark.parametrize("alpha", [0, -0.1])
def test_feddyn_rejects_an_alpha_that_is_not_positive(alpha: float) -> None:
    with pytest.raises(CoterieError, match="alpha"):
        build_method("feddyn", {"alpha": alpha})


def test_feddyn_can_scale_alpha_by_relative_sample_counts() -> None:
    s = session("feddyn", own={"scale_alpha": True}, rounds=1)
    loop, seen = watch(s)
    assert [len(u) for u in seen] == [5, 3] and not seen[0][0].tree
    n = s.federation.sizes("train")[:5]
    sent = s.method.down(loop.server, [0, 1], 1)
    for i in (0, 1):
        data = s.federation.data(i)
        _, extras = s.method.begin(s.method.init_client(data), sent.to(i), data, 1).model
        assert extras["alpha"] == pytest.approx(0.01 / (n[i] * 5 / n.sum()), rel=1e-5)
    assert traffic(loop, "down")[1] == size(s.method.ctx.w0) + 4
