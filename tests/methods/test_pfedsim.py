"""Tests of pFedSim."""

from typing import Any

import pytest
import torch

from coterie.core import tree as T
from coterie.methods import pfedsim
from coterie.methods.pfedsim import PFedSim
from support.short_runs import (
    CLIENTS,
    HEAD,
    bound,
    jittered,
    near,
    play,
    same,
    session,
    size,
    state,
    traffic,
    upload,
    watch,
)


def test_pfedsim_with_rho_one_is_fedavg() -> None:
    assert same(play("pfedsim", own={"rho": 1.0}).server["w"], play("fedavg").server["w"])


def test_pfedsim_with_rho_zero_and_orthogonal_heads_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfedsim, "cosine_rows", lambda heads: torch.zeros(len(heads), len(heads)).double())
    sim, local = play("pfedsim", own={"rho": 0.0}), play("local")
    assert all(same(state(sim, i)["w"], state(local, i)["own"]) for i in CLIENTS if state(local, i))


def second_phase(*heads: torch.Tensor) -> tuple[PFedSim, dict[str, Any]]:
    """Return a method and its server after the first clients have sent these classifiers."""
    method = bound("pfedsim", own={"rho": 0.0})
    assert isinstance(method, PFedSim)
    trees = [{**jittered(method.ctx.w0, i), "classifier.weight": h} for i, h in enumerate(heads)]
    return method, method.aggregate(method.setup(), [upload(method, i, t) for i, t in enumerate(trees)], 1)


def test_pfedsim_identical_heads_weigh_equally_and_orthogonal_ones_nothing() -> None:
    a, b = torch.zeros(10, 16), torch.zeros(10, 16)
    a[:, 0], b[:, 1] = 2.0, 3.0
    method, server = second_phase(a, 5 * a, b)
    X = method.mixing(server["similarity"], torch.arange(5))
    expected = torch.tensor([[0.5, 0.5, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [0, 0, 1, 0, 0]]).double()
    assert torch.allclose(X[:3], expected, atol=1e-9)
    assert torch.allclose(X.sum(1), torch.ones(5).double()) and bool((X >= 0).all())


def test_pfedsim_weights_follow_the_paper_and_negative_cosines_weigh_nothing() -> None:
    a, b = torch.zeros(10, 16), torch.zeros(10, 16)
    a[:, 0], b[:, 0], b[:, 1] = 1.0, 1.0, 1.0
    b[5:] = 0  # five classes at 45 degrees, five without direction: s = 0.5 / sqrt(2)
    method, server = second_phase(a, b, -a)
    assert float(server["similarity"][0, 1]) == pytest.approx(0.5**0.5 / 2, abs=1e-6)
    assert float(server["similarity"][0, 2]) == 0
    own, other = -torch.log(torch.tensor(1e-4).double()), -torch.log(torch.tensor(1 - 0.5**0.5 / 2).double())
    assert float(method.mixing(server["similarity"], torch.tensor([0]))[0, 1]) == pytest.approx(
        float(other / (own + other)), abs=1e-6
    )


def test_pfedsim_renews_only_pairs_that_answered_together() -> None:
    h = [torch.randn(10, 16, generator=torch.Generator().manual_seed(i)).abs() for i in range(3)]
    method, server = second_phase(*h)
    tree = {**jittered(method.ctx.w0, 9), "classifier.weight": -h[0]}
    after = method.aggregate(server, [upload(method, 0, tree), upload(method, 3, tree)], 2)
    old, new = server["similarity"], after["similarity"]
    assert torch.equal(old[:3, :3][1:, 1:], new[:3, :3][1:, 1:]) and torch.equal(old[0, 1:3], new[0, 1:3])
    assert float(new[0, 3]) == pytest.approx(1.0, abs=1e-6) and float(new[1, 3]) == 0


def test_pfedsim_never_mixes_heads_and_hands_the_general_one_over_once() -> None:
    h = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).abs()
    method, server = second_phase(h, h)
    sent = method.down(server, [0, 4, 99], 2)
    assert sent.to(0).keys() == method.ctx.w0.keys() - HEAD
    assert same(sent.to(4), server["w"]) and same(sent.to(99), server["w"])
    V = server["bank"]["flat"]
    mean = T.unflatten((V[0] + V[1]) / 2, server["w"])
    assert near(sent.to(0), T.drop(mean, HEAD.__contains__), 1e-5)


def test_pfedsim_counts_the_whole_model_up_and_the_body_down_in_its_second_phase() -> None:
    s = session("pfedsim", rounds=6, join=1.0)
    loop, _ = watch(s)
    w = size(s.method.ctx.w0)
    assert traffic(loop, "up") == [w] * 6
    assert traffic(loop, "down") == [w, w, w, w, *[w - size(s.method.ctx.w0, HEAD)] * 2]
    assert s.method.global_model(loop.server) is None


def test_pfedsim_scores_the_last_trained_model_or_the_mixture() -> None:
    loop = play("pfedsim", own={"rho": 0.0}, join=1.0)
    data = session("pfedsim").federation.data(0)
    sent = loop.method.down(loop.server, [0], 4).to(0)
    assert same(loop.method.personal(state(loop, 0), sent, data)[0], state(loop, 0)["w"])
    mixed = bound("pfedsim", own={"score": "mixed"}).personal(state(loop, 0), sent, data)[0]
    assert torch.equal(mixed["fc1.weight"], sent["fc1.weight"])
    assert torch.equal(mixed["classifier.weight"], state(loop, 0)["w"]["classifier.weight"])
