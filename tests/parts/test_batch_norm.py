"""Tests of the statistics of batch norm."""

import pytest
import torch
from torch import nn

from coterie.parts import batch_norm as norms
from support.short_runs import session


def test_input_moments_merge_batches_with_the_between_batch_term(monkeypatch: pytest.MonkeyPatch) -> None:
    s = session("fedbn")
    net, w, x = s.method.ctx.net, s.method.ctx.w0, s.federation.data(0).train.x
    monkeypatch.setattr(norms, "_CHUNK", 7)
    found = norms.input_moments(net, w, x, ["bn1"])[0]
    entering = nn.functional.linear(x.flatten(1), w["fc1.weight"], w["fc1.bias"]).double()
    assert torch.allclose(found.mean, entering.mean(0), atol=1e-6)
    assert torch.allclose(found.var, entering.var(0, correction=0), atol=1e-6)
