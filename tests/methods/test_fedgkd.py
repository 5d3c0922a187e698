"""Tests of FedGKD."""

import pytest
import torch
import torch.nn.functional as F

from coterie.core import tree as T
from coterie.core.method import Batch
from support.short_runs import jittered, near, play, same, session, size, traffic, watch


def test_fedgkd_without_distillation_is_fedavg() -> None:
    assert same(play("fedgkd", own={"gamma": 0}).server["w"], play("fedavg").server["w"])


def test_fedgkd_has_no_teacher_in_the_first_round() -> None:
    one, avg = play("fedgkd", own={"gamma": 5}, rounds=1), play("fedavg", rounds=1)
    assert same(one.server["w"], avg.server["w"])
    assert not near(play("fedgkd", own={"gamma": 5}, rounds=2).server["w"], play("fedavg", rounds=2).server["w"], 1e-3)


def test_fedgkd_keeps_the_last_global_models_and_sends_their_mean() -> None:
    s = session("fedgkd", own={"models": 2}, rounds=4)
    loop, _ = watch(s)
    past = loop.server["past"]
    assert len(past) == 2 and same(past[-1], loop.server["w"]) and not same(past[0], past[1])
    sent = s.method.down(loop.server, [0], 5).to(0)
    assert same(T.tagged("teacher", sent), T.mean(past)) and same(T.untagged(sent), loop.server["w"])


def test_fedgkd_sends_the_teacher_only_where_it_is_not_the_model() -> None:
    loop = play("fedgkd", rounds=4)
    whole = size(loop.server["w"])
    assert traffic(loop, "down") == [whole, whole, 2 * whole, 2 * whole]
    assert traffic(loop, "up") == [whole] * 4
    assert traffic(play("fedgkd", own={"models": 1}, rounds=4), "down") == [whole] * 4


def test_fedgkd_adds_half_gamma_times_the_divergence_at_the_temperature() -> None:
    s = session("fedgkd", own={"gamma": 0.6, "temperature": 2.0})
    method, data = s.method, s.federation.data(0)
    w, teacher = method.ctx.w0, jittered(method.ctx.w0, 1, 0.5)
    start = method.begin({}, {**w, **T.tag("teacher", teacher)}, data, 2)
    assert start.per_sample is not None and torch.equal(start.per_sample, method.ctx.outputs(teacher, data.train.x))
    batch = Batch(data.train.x[:6], data.train.y[:6], None, start.per_sample[:6])
    p, q = ((o / 2).softmax(1) for o in (start.per_sample[:6], method.ctx.forward(w, batch.x)))
    far = (p * (p / q).log()).sum(1).mean()
    expected = F.cross_entropy(method.ctx.forward(w, batch.x), batch.y) + 0.3 * 4 * far
    assert float(method.loss(w, batch, {})) == pytest.approx(float(expected), abs=1e-5)
    padded = Batch(data.train.x[:8], data.train.y[:8], torch.tensor([1.0] * 6 + [0.0] * 2), start.per_sample[:8])
    assert float(method.loss(w, padded, {})) == pytest.approx(float(expected), abs=1e-5)
