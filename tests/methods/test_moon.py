"""Tests of MOON."""

import pytest
import torch

from coterie.core.method import Batch
from support.short_runs import jittered, near, plain, play, same, session, state, watch


def test_moon_without_its_term_is_fedavg() -> None:
    moon, avg = play("moon", own={"mu": 0}), play("fedavg")
    assert same(moon.server["w"], avg.server["w"])


def test_moon_has_nothing_to_contrast_in_the_first_round() -> None:
    """The last model is the received one, so the term is log 2 for every sample and any features."""
    moon, avg = play("moon", plain(), rounds=1), play("fedavg", plain(), rounds=1)
    assert near(moon.server["w"], avg.server["w"], 1e-5)
    moon, avg = play("moon", plain(), rounds=3, join=1.0), play("fedavg", plain(), rounds=3, join=1.0)
    assert not near(moon.server["w"], avg.server["w"], 1e-3)


def test_moon_draws_features_to_the_received_model_and_from_the_last() -> None:
    s = session("moon", own={"mu": 1.0, "tau": 1.0})
    method, data = s.method, s.federation.data(0)
    batch = Batch(data.train.x[:6], data.train.y[:6])
    own, other = method.ctx.w0, jittered(method.ctx.w0, 1, 0.5)
    losses = [
        float(method.loss(own, batch, {"received": a, "last": b})) for a, b in ((own, other), (own, own), (other, own))
    ]
    assert losses[0] < losses[1] < losses[2]
    assert losses[1] == pytest.approx(float(method.ctx.ce(own, batch)) + float(torch.tensor(2.0).log()), abs=1e-5)


def test_moon_keeps_the_model_it_uploaded() -> None:
    loop, seen = watch(session("moon"))
    last = {u.sender: u.tree for round in seen for u in round}
    assert all(same(state(loop, i)["last"], tree) for i, tree in last.items())
