"""Heads of labels and masks of their entries (FedGMH)."""

import pytest
import torch
import torch.nn.functional as F

from coterie.errors import CoterieError
from coterie.methods.fedgmh import heads as G
from coterie.methods.fedgmh.features import average_in
from coterie.parts import linear_heads as H
from coterie.parts import masks as M
from coterie.parts.linear_heads import Heads

RNG = torch.Generator().manual_seed(0)
S, D = 4, 6


def head(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(S, D, generator=rng), "bias": torch.randn(S, generator=rng)}


def stack() -> Heads:
    rng = torch.Generator().manual_seed(1)
    return Heads(torch.randn(S, S, D, generator=rng).double(), torch.randn(S, S, generator=rng).double())


def test_p1_beta_one_replaces_the_head_and_beta_zero_leaves_it() -> None:
    own, g, moved = head(0), head(1), head(2)
    for scope in ("head", "tensor"):
        assert all(torch.equal(M.write_in(own, g, G.critical_mask(own, moved, 1.0, scope))[k], g[k]) for k in g)
        assert all(torch.equal(M.write_in(own, g, G.critical_mask(own, moved, 0.0, scope))[k], own[k]) for k in g)


def test_p2_shares_sum_to_one_and_equal_heads_mix_to_themselves() -> None:
    q = G.label_shares(torch.tensor([3, 0, 7, 1]))
    assert float(q.sum()) == pytest.approx(1) and float(q[2]) == pytest.approx(7 / 11)
    one = head()
    g = G.mix_heads({k: v.expand(S, *v.shape) for k, v in one.items()}, q)
    assert all(torch.allclose(g[k], one[k], atol=1e-6) and g[k].shape == one[k].shape for k in one)
    with pytest.raises(CoterieError, match="at least one"):
        G.label_shares(torch.zeros(3))


def test_p3_a_client_with_one_label_gets_that_head_exactly() -> None:
    stacked = {k: torch.stack([head(s)[k] for s in range(S)]) for k in ("weight", "bias")}
    g = G.mix_heads(stacked, G.label_shares(torch.tensor([0, 0, 9, 0])))
    assert all(torch.equal(g[k], head(2)[k]) for k in g)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.29, 0.5, 0.77, 1.0])
def test_p4_mask_has_exactly_floor_beta_l_ones_and_they_are_the_largest(beta) -> None:
    before, after = head(0), head(1)
    size = S * D + S
    mask = torch.cat([m.flatten() for m in G.critical_mask(before, after, beta).values()])
    score = torch.cat([p.flatten() for p in M.criticality(before, after).values()])
    assert int(mask.sum()) == int(beta * size + 1e-9)
    if mask.any() and not mask.all():
        assert float(score[mask].min()) >= float(score[~mask].max())
    per = G.critical_mask(before, after, beta, "tensor")
    assert [int(m.sum()) for m in per.values()] == [int(beta * S * D + 1e-9), int(beta * S + 1e-9)]


def test_p4_ties_go_to_the_lower_index_with_an_exact_count() -> None:
    assert M.top_mask(torch.tensor([1.0, 2, 1, 1]), 2).tolist() == [True, True, False, False]
    assert M.top_mask(torch.zeros(2, 5), 2).tolist() == [[True, True, False, False, False]] * 2
    many = M.top_mask(torch.arange(5000) % 2 * 1.0, 1000)
    assert torch.equal(many.nonzero().flatten(), torch.arange(1, 2000, 2))
    assert M.share_count(0.29, 100) == 29 and M.share_count(0.5, 5) == 2


def test_p5_criticality_ignores_a_common_sign_and_is_zero_without_movement() -> None:
    before, after = head(0), head(1)
    after["weight"][1] = before["weight"][1]
    p = M.criticality(before, after)
    flipped = M.criticality({k: -v for k, v in before.items()}, {k: -v for k, v in after.items()})
    assert all(torch.equal(p[k], flipped[k]) for k in p)
    assert not p["weight"][1].any()


def test_p7_one_step_raises_its_logit_lowers_the_loss_and_gradient_rows_sum_to_zero() -> None:
    heads = stack()
    f = torch.rand(S, 1, D, generator=RNG).double()
    ones = torch.ones(S, 1).double()
    y = G.label_targets(ones)
    new = H.head_step(heads, f, y, ones, 0.01)

    def logits(h: Heads) -> torch.Tensor:
        return f @ h.weight.transpose(1, 2) + h.bias[:, None]

    for s in range(S):
        assert logits(new)[s, 0, s] > logits(heads)[s, 0, s]
        assert F.cross_entropy(logits(new)[s], y[s]) < F.cross_entropy(logits(heads)[s], y[s])
    torch.testing.assert_close((new.weight - heads.weight).sum(1), torch.zeros(S, D).double(), rtol=0, atol=1e-12)


def test_step_is_sgd_on_the_mean_cross_entropy() -> None:
    heads = stack()
    f = torch.randn(S, 5, D, generator=RNG).double()
    weight = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [2, 1, 0, 0, 0]]).double()
    y = torch.randint(0, S, (S, 5), generator=RNG)
    new = H.head_step(heads, f, y, weight, 0.3, decay=0.1)
    for s in range(S):
        w, b = heads.weight[s].clone().requires_grad_(), heads.bias[s].clone().requires_grad_()
        each = F.cross_entropy(f[s] @ w.T + b, y[s], reduction="none")
        loss = (each * weight[s]).sum() / weight[s].sum() + 0.05 * (w.square().sum() + b.square().sum())
        gw, gb = torch.autograd.grad(loss, (w, b))
        torch.testing.assert_close(new.weight[s], w - 0.3 * gw)
        torch.testing.assert_close(new.bias[s], b - 0.3 * gb)
    assert H.head_step(Heads(heads.weight, None), f, y, weight, 0.3).bias is None


def test_p8_heads_without_vectors_are_bit_identical() -> None:
    heads = stack()
    features, weight = G.padded(torch.tensor([2, 0, 2]), torch.randn(3, D, generator=RNG).double(), S)
    new = H.train_heads(heads, features, G.label_targets(weight), weight, 1.0, steps=2, decay=0.1)
    for s in (1, 3):
        assert torch.equal(new.weight[s], heads.weight[s]) and torch.equal(new.bias[s], heads.bias[s])
    for s in (0, 2):
        assert not torch.equal(new.weight[s], heads.weight[s])


def test_p9_the_same_vector_twice_is_the_same_step() -> None:
    heads, f = stack(), torch.randn(1, D, generator=RNG).double()
    once, w1 = G.padded(torch.tensor([1]), f, S)
    twice, w2 = G.padded(torch.tensor([1, 1]), f.expand(2, D), S)
    a = H.head_step(heads, once, G.label_targets(w1), w1, 1.0)
    b = H.head_step(heads, twice, G.label_targets(w2), w2, 1.0)
    torch.testing.assert_close(a.weight, b.weight)
    torch.testing.assert_close(a.bias, b.bias)


def test_packing_keeps_the_order_of_arrival_within_a_label() -> None:
    f = torch.arange(5.0)[:, None]
    packed, weight = G.padded(torch.tensor([1, 0, 1, 3, 1]), f, S, torch.tensor([1.0, 2, 3, 4, 5]))
    assert packed[..., 0].tolist() == [[1, 0, 0], [0, 2, 4], [0, 0, 0], [3, 0, 0]]
    assert weight.tolist() == [[2, 0, 0], [1, 3, 5], [0, 0, 0], [4, 0, 0]]


def test_single_head_step_does_not_depend_on_client_order() -> None:
    one = Heads(stack().weight[:1], stack().bias[:1])
    f, y = torch.randn(1, 7, D, generator=RNG).double(), torch.randint(0, S, (1, 7), generator=RNG)
    order = torch.randperm(7, generator=RNG)
    ones = torch.ones(1, 7).double()
    a, b = H.head_step(one, f, y, ones, 1.0), H.head_step(one, f[:, order], y[:, order], ones, 1.0)
    torch.testing.assert_close(a.weight, b.weight)
    batches = H.train_heads(one, f, y, ones, 1.0, batch=3)
    by_hand = one
    for part in (slice(0, 3), slice(3, 6), slice(6, 7)):
        by_hand = H.head_step(by_hand, f[:, part], y[:, part], ones[:, part], 1.0)
    assert torch.equal(batches.weight, by_hand.weight)


def test_p11_average_in_of_an_equal_head_is_the_identity() -> None:
    own = head()
    assert all(torch.equal(average_in(own, own)[k], own[k]) for k in own)


@pytest.mark.parametrize("norm", [0.8, 8.0, 30.0])
def test_p15_three_hundred_steps_at_rate_one_saturate_without_diverging(norm) -> None:
    rng = torch.Generator().manual_seed(3)
    width = 512
    f = torch.randn(10, 8, width, generator=rng).relu()
    f = norm * F.normalize(f, dim=-1)
    heads = Heads(torch.randn(10, 10, width, generator=rng) / width**0.5, torch.zeros(10, 10))
    ones = torch.ones(10, 8)
    sizes = {}
    for step in range(1, 301):
        heads = H.head_step(heads, f, G.label_targets(ones), ones, 1.0)
        if step in (100, 300):
            sizes[step] = heads.weight.flatten(1).norm(dim=1)
    assert torch.isfinite(heads.weight).all() and torch.isfinite(heads.bias).all()
    p = (f @ heads.weight.transpose(1, 2) + heads.bias[:, None]).softmax(-1)
    assert float(p.diagonal(dim1=0, dim2=2).min()) > 0.99
    assert bool((sizes[300] < 1.2 * sizes[100]).all())


def test_beta_outside_01_and_unknown_scope_are_refused() -> None:
    with pytest.raises(CoterieError, match="beta"):
        G.critical_mask(head(), head(1), 1.5)
    with pytest.raises(CoterieError, match="mask_scope"):
        G.critical_mask(head(), head(1), 0.5, "tensors")
