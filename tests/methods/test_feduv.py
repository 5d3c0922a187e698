"""Tests of FedUV."""

import pytest
import torch
import torch.nn.functional as F

from coterie.core.method import Batch
from coterie.methods.feduv import uniformity, variance
from support.short_runs import play, same, session


def test_feduv_without_its_terms_is_fedavg() -> None:
    assert same(play("feduv", own={"lam": 0, "mu": 0}).server["w"], play("fedavg").server["w"])


def test_balanced_and_certain_predictions_have_no_loss_of_variance() -> None:
    one = torch.ones(5)
    assert float(variance(torch.eye(5), one)) == pytest.approx(0, abs=1e-6)
    # all samples alike: the deviation is 0, so the hinge is 1 / sqrt(classes)
    assert float(variance(torch.full((5, 4), 0.25), one)) == pytest.approx(0.5, abs=1e-5)


def test_uniformity_of_two_distances() -> None:
    """Distances 1, 2 and 1 on a line: squares 1, 4, 1 have the median 1."""
    z = torch.tensor([[0.0], [1.0], [2.0]])
    e = torch.exp(torch.tensor(-1.0))
    assert float(uniformity(z, torch.ones(3))) == pytest.approx(float((2 * e + e**4) / 3), abs=1e-6)
    assert float(uniformity(torch.zeros(3, 2), torch.ones(3))) == 1.0  # equal features: no median


def test_both_terms_and_their_gradients_are_those_of_the_plain_formulas_and_ignore_padding() -> None:
    torch.manual_seed(0)
    z, logits = torch.randn(9, 6, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    weight = torch.tensor([1.0] * 7 + [0.0] * 2, dtype=torch.float64)
    for used, w in ((7, weight), (9, torch.ones(9, dtype=torch.float64))):
        x, y = z.clone().requires_grad_(), logits.clone().requires_grad_()
        (uniformity(x, w) + variance(y.softmax(1), w)).backward()
        a, b = z[:used].clone().requires_grad_(), logits[:used].clone().requires_grad_()
        d2 = F.pdist(a).square()
        plain = torch.exp(-d2 / d2.median()).mean() + F.relu(0.5 - b.softmax(1).std(0)).mean()
        plain.backward()
        assert x.grad is not None and a.grad is not None and y.grad is not None and b.grad is not None
        assert torch.allclose(x.grad[:used], a.grad, atol=1e-9) and not x.grad[used:].any()
        assert torch.allclose(y.grad[:used], b.grad, atol=1e-9)


def test_a_batch_of_one_sample_has_the_loss_of_the_task() -> None:
    s = session("feduv")
    data, ctx = s.federation.data(0), s.method.ctx
    for batch in (
        Batch(data.train.x[:1], data.train.y[:1]),
        Batch(data.train.x[:3], data.train.y[:3], torch.tensor([1.0, 0.0, 0.0])),
    ):
        assert float(s.method.loss(ctx.w0, batch, {})) == pytest.approx(float(ctx.ce(ctx.w0, batch)), abs=1e-6)
