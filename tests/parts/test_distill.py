"""Losses between the outputs of two models: distillation, balanced softmax, MMD."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from coterie.parts import distill as Di

RNG = torch.Generator().manual_seed(0)


def test_p12_sc_fpfl_kl_is_zero_with_zero_gradient_on_agreement_and_never_negative() -> None:
    a, b = torch.randn(2, 9, 5, generator=RNG).double()
    assert float(Di.kl(a, a + 3)) == pytest.approx(0, abs=1e-15)
    assert float(grad(lambda s: Di.kl(a, s))(a).abs().max()) < 1e-15
    want = (a.softmax(1) * (a.softmax(1) / b.softmax(1)).log()).sum(1).mean()
    assert float(Di.kl(a, b)) == pytest.approx(float(want)) and float(Di.kl(a, b)) > 0
    assert float(Di.kl(a, b)) != pytest.approx(float(Di.kl(b, a)))


def test_kl_does_not_teach_the_teacher_and_ignores_padding() -> None:
    a, b = torch.randn(2, 4, 5, generator=RNG)
    assert not grad(lambda t: Di.kl(t, b))(a).any()
    assert grad(lambda t: Di.mutual_kl(t, b))(a).any()
    assert float(Di.mutual_kl(a, b)) == pytest.approx(float(Di.kl(a, b) + Di.kl(b, a)) / 2)
    weight = torch.tensor([1.0, 1, 0, 0])
    assert float(Di.kl(a, b, weight)) == pytest.approx(float(Di.kl(a[:2], b[:2])), rel=1e-6)


def test_fedrod_equal_counts_give_plain_cross_entropy() -> None:
    logits, y = torch.randn(6, 4, generator=RNG), torch.randint(0, 4, (6,), generator=RNG)
    plain = F.cross_entropy(logits, y)
    torch.testing.assert_close(F.cross_entropy(Di.balanced_logits(logits, torch.full((4,), 25)), y), plain)
    assert torch.equal(Di.balanced_logits(logits, torch.tensor([1, 0, 3, 4]), gamma=0.0), logits)
    shifted = Di.balanced_logits(logits, torch.tensor([1, 2, 4, 0]), gamma=2.0)
    torch.testing.assert_close((shifted - logits)[:, 2], torch.full((6,), 2 * math.log(4)))
    assert torch.isfinite(shifted).all()


def test_fedcp_mmd_of_a_sample_with_itself_is_zero_and_grows_with_the_gap() -> None:
    x = torch.randn(8, 3, generator=RNG)
    assert float(Di.mmd(x, x)) == 0
    near, far = float(Di.mmd(x, x + 0.5)), float(Di.mmd(x, x + 3))
    assert 0 < near < far
    one, two = torch.zeros(1, 1), torch.full((1, 1), 2.0)
    assert float(Di.mmd(one, two, [10.0])) == pytest.approx(2 - 2 * math.exp(-4 / 20))
    weight = torch.tensor([1.0] * 5 + [0.0] * 3)
    assert float(Di.mmd(x, x.flip(1), weight=weight)) == pytest.approx(float(Di.mmd(x[:5], x[:5].flip(1))), abs=1e-6)
