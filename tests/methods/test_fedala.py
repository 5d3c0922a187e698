"""Tests of FedALA."""

from typing import Any

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Batch, Trained
from coterie.methods.fedala import FedALA, merged
from support.short_runs import CLIENTS, HEAD, jittered, near, play, same, session, size, state, traffic


@pytest.mark.parametrize("own", [{"layers": 3, "eta": 0}, {"layers": 0}])
def test_fedala_with_weights_of_one_or_none_is_fedavg(own: dict[str, Any]) -> None:
    assert same(play("fedala", own=own).server["w"], play("fedavg").server["w"])


def test_fedala_with_weights_of_zero_on_all_layers_is_local() -> None:
    ala = play("fedala", own={"layers": 3, "eta": 0, "start": 0}, join=1.0)
    local = play("local", join=1.0)
    assert all(same(state(ala, i)["o"], state(local, i)["own"]) for i in CLIENTS)


def test_fedala_weights_move_and_stay_between_zero_and_one() -> None:
    loop = play("fedala", own={"layers": 3}, join=1.0)
    flat = torch.cat([T.flatten(state(loop, i)["A"]) for i in CLIENTS])
    assert float(flat.min()) >= 0 and float(flat.max()) <= 1 and float(flat.std()) > 0


def test_fedala_takes_lower_layers_as_received_and_skips_the_first_round() -> None:
    s = session("fedala")
    method, data = s.method, s.federation.data(0)
    w = jittered(method.ctx.w0, 1)
    first, extras = method.begin(method.init_client(data), w, data, 1).model
    assert same(first, w) and "A" not in extras
    kept, _ = method.end(method.init_client(data), Trained(jittered(w, 2), extras), data, 1)
    assert not kept["settled"]
    second, extras = method.begin(kept, w, data, 2).model
    assert all(torch.equal(second[k], w[k]) for k in w if k not in HEAD)
    assert any(not torch.equal(second[k], w[k]) for k in HEAD)
    assert method.end(kept, Trained(second, extras), data, 2)[0]["settled"]


def test_fedala_step_is_the_papers_and_the_loop_has_a_cap() -> None:
    s = session("fedala", own={"threshold": 0.0, "max_epochs": 3, "share": 1.0, "eta": 0.5}, batch=1000)
    method, data = s.method, s.federation.data(0)
    assert isinstance(method, FedALA)
    old, new = method.ctx.w0, jittered(method.ctx.w0, 1, 1.0)
    A = {k: torch.full_like(old[k], 0.5) for k in HEAD}
    theta = merged(old, new, A)
    leaves = [theta[k].requires_grad_() for k in sorted(HEAD)]
    loss = method.ctx.ce(theta, Batch(data.train.x, data.train.y))
    slopes = dict(zip(sorted(HEAD), torch.autograd.grad(loss, leaves), strict=True))
    once = method.learned(A, old, new, data, 2, 1)
    for k in HEAD:
        assert torch.allclose(once[k], (A[k] - 0.5 * slopes[k] * (new[k] - old[k])).clamp(0, 1), atol=1e-6)
    thrice = method.learned(method.learned(once, old, new, data, 2, 1), old, new, data, 2, 1)
    for settled, expected in ((False, thrice), (True, once)):
        _, extras = method.begin({"o": old, "A": A, "settled": settled}, new, data, 2).model
        assert near(extras["A"], expected)
    assert not near(once, thrice)


def test_fedala_stops_when_losses_have_settled() -> None:
    s = session("fedala", own={"threshold": 1e9, "window": 2, "share": 1.0}, batch=1000)
    method, data = s.method, s.federation.data(0)
    assert isinstance(method, FedALA)
    old, new = method.ctx.w0, jittered(method.ctx.w0, 1, 1.0)
    A = {k: torch.full_like(old[k], 0.5) for k in HEAD}
    assert same(method.learned(A, old, new, data, 2, 50), method.learned(A, old, new, data, 2, 3))


def test_fedala_scores_its_own_last_model() -> None:
    loop = play("fedala", join=1.0)
    data = session("fedala").federation.data(0)
    assert same(loop.method.personal(state(loop, 0), loop.server["w"], data)[0], state(loop, 0)["o"])
    assert not same(state(loop, 0)["o"], loop.server["w"])
    assert traffic(loop, "up") == traffic(loop, "down") == [size(loop.method.ctx.w0)] * 3
