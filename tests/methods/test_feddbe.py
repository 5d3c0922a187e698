"""Tests of FedDBE."""

import pytest
import torch
import torch.nn.functional as F

from coterie.core.method import Batch
from support.short_runs import session, size, state, traffic, watch


def test_feddbe_opens_with_means_and_then_sends_the_model() -> None:
    s = session("feddbe")
    loop, seen = watch(s)
    whole, d = size(s.method.ctx.w0), 4 * s.method.ctx.net.width
    assert traffic(loop, "up") == [d, whole, whole, whole] and traffic(loop, "down") == [0, *[whole + d] * 3]
    n = [u.samples for u in seen[0]]
    mean = sum(k * u.tree["x:mean"] for k, u in zip(n, seen[0], strict=True)) / sum(n)
    assert torch.allclose(loop.server["mean"], mean, atol=1e-6)
    assert any(float(state(loop, i)["own"]["p:bias"].abs().sum()) > 0 for i in range(5))


def test_feddbe_pulls_the_mean_of_a_batch_and_adds_the_bias_before_the_head() -> None:
    s = session("feddbe", own={"kappa": 4.0})
    method, data = s.method, s.federation.data(0)
    batch = data.train
    params = {**method.ctx.w0, "p:bias": torch.full((16,), 0.5)}
    z = method.ctx.features(params, batch.x)
    common = torch.linspace(-1, 1, 16)
    found = method.loss(params, Batch(batch.x, batch.y), {"mean": common, "kappa": 4.0})
    ce = F.cross_entropy(method.ctx.logits(params, z + 0.5), batch.y)
    assert float(found) == pytest.approx(float(ce + 2 * (z.mean(0) - common).square().mean()), rel=1e-5)
