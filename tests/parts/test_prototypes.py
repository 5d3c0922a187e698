"""Prototypes and how FedPC mixes them: weights, class means, the pull of the loss."""

import pytest
import torch
from torch.func import grad, vmap

from coterie.methods.fedpc import mixing as X
from coterie.parts import prototypes as P
from coterie.parts.prototypes import Prototypes

RNG = torch.Generator().manual_seed(0)
K, D = 4, 5


def sets(n: int, absent: float = 0.0) -> Prototypes:
    mask = torch.rand(n, K, generator=RNG) >= absent
    return Prototypes(torch.rand(n, K, D, generator=RNG, dtype=torch.float64) * mask[..., None], mask)


@pytest.mark.parametrize("sim_map", ["clip", "shift01", "softmax"])
def test_p1_rho_rows_are_a_distribution_with_the_maximum_on_the_diagonal(sim_map) -> None:
    rho = X.group_weights(sets(5, 0.4), sim_map)
    assert float(rho.min()) >= 0
    torch.testing.assert_close(rho.sum(1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(rho.diagonal(), rho.amax(1))


def test_p2_one_group_is_the_plain_mean_of_prototypes() -> None:
    p = sets(6)
    value, mask = X.group_means(p, torch.zeros(6, dtype=torch.int64), 1)
    torch.testing.assert_close(value[0], p.value.mean(0))
    assert mask.all() and X.group_weights(Prototypes(value, mask)).tolist() == [[1.0]]


def test_p3_identical_groups_have_equal_weights() -> None:
    one = sets(1, 0.3)
    rho = X.group_weights(Prototypes(one.value.expand(3, -1, -1), one.mask.expand(3, -1)))
    torch.testing.assert_close(rho, torch.full((3, 3), 1 / 3, dtype=torch.float64))


def test_p4_orthogonal_groups_or_groups_without_common_class_do_not_mix() -> None:
    value = torch.zeros(3, K, D)
    value[0, 0, 0] = value[1, 0, 1] = value[2, 1, 0] = 1
    mask = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]).bool()
    assert torch.equal(X.group_weights(Prototypes(value, mask)), torch.eye(3, dtype=torch.float64))
    assert float(X.group_weights(Prototypes(value, mask), "shift01")[0, 2]) == 0
    mixed = X.masked_mix(X.group_weights(Prototypes(value, mask)), Prototypes(value, mask))
    assert torch.equal(mixed.value, value) and torch.equal(mixed.mask, mask)


def test_p5_scaling_one_group_leaves_rho_unchanged() -> None:
    p = sets(4, 0.3)
    scaled = p.value.clone()
    scaled[2] *= 7.5
    torch.testing.assert_close(X.group_weights(Prototypes(scaled, p.mask)), X.group_weights(p))


def test_cosine_of_groups_uses_common_classes_only() -> None:
    p = sets(5, 0.4)
    cos, common = X.group_cosine(p)
    for i in range(5):
        for j in range(5):
            both = p.mask[i] & p.mask[j]
            assert bool(common[i, j]) == (bool(both.any()) or i == j)
            if i != j and both.any():
                a, b = p.value[i][both].flatten(), p.value[j][both].flatten()
                assert float(cos[i, j]) == pytest.approx(float(a @ b / (a.norm() * b.norm())))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_p6_prototype_is_the_class_mean_whatever_batch_size_and_order(chunk) -> None:
    z = torch.randn(50, D, generator=RNG)
    y = torch.randint(0, K - 1, (50,), generator=RNG)
    (value, mask), counts = P.collect(lambda x: x, z, y, K, chunk)
    for k in range(K - 1):
        torch.testing.assert_close(value[k], z[y == k].mean(0), rtol=0, atol=1e-6)
    assert mask.tolist() == [True] * (K - 1) + [False] and not value[-1].any()
    assert torch.equal(counts, torch.bincount(y, minlength=K))
    order = torch.randperm(50, generator=RNG)
    torch.testing.assert_close(P.collect(lambda x: x, z[order], y[order], K, chunk)[0].value, value)


def test_p6_many_large_features_keep_their_digits() -> None:
    z = 1000 + torch.rand(20_000, 2, generator=RNG)
    y = torch.zeros(20_000, dtype=torch.int64)
    (value, _), _ = P.collect(lambda x: x, z, y, 1, 20_000)
    assert torch.equal(value[0], z.double().mean(0).float())


def loss_case():
    z = torch.randn(6, D, generator=RNG, dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 2, 2, 2])
    p = Prototypes(torch.randn(K, D, generator=RNG, dtype=torch.float64), torch.tensor([True, True, False, True]))
    return z, y, p


def test_p9_loss_is_zero_at_the_prototypes_with_a_finite_gradient() -> None:
    z, y, _ = loss_case()
    at = P.class_means(z, y, K)
    assert float(P.prototype_loss(z, y, at)) == pytest.approx(0, abs=K * 1e-6)  # 1e-6 a class, from under the root
    slope = grad(lambda v: P.prototype_loss(v, y, at))(z)
    assert torch.isfinite(slope).all()
    moved = Prototypes(at.value + 0.1, at.mask)
    assert float(P.prototype_loss(z, y, moved)) == pytest.approx(3 * 0.1 * D**0.5)


def test_p10_absent_classes_add_nothing_to_the_loss() -> None:
    z, y, p = loss_case()
    want = sum((z[y == k].mean(0) - p.value[k]).norm() for k in (0, 1))  # 2 has no prototype, 3 is not in the batch
    assert float(P.prototype_loss(z, y, p)) == pytest.approx(float(want))
    assert float(P.prototype_loss(z, y, p, reduce="mean")) == pytest.approx(float(want) / 2)
    slope = grad(lambda v: P.prototype_loss(v, y, p))(z)
    assert not slope[3:].any() and slope[:3].abs().sum(1).min() > 0
    none = Prototypes(p.value, torch.zeros(K, dtype=torch.bool))
    for kind in ("batch_mean", "per_sample", "mse"):
        assert float(P.prototype_loss(z, y, none, kind, "mean", repulsion=1.0)) == 0


def test_p10_absent_classes_add_nothing_to_group_prototypes() -> None:
    p = sets(6, 0.5)
    noisy = Prototypes(torch.where(p.mask[..., None], p.value, torch.full_like(p.value, 99.0)), p.mask)
    groups = torch.tensor([0, 1, 0, 1, 2, 2])
    value, mask = X.group_means(noisy, groups, 3)
    for j in range(3):
        for k in range(K):
            held = p.value[(groups == j) & p.mask[:, k], k]
            assert bool(mask[j, k]) == (len(held) > 0)
            torch.testing.assert_close(value[j, k], held.mean(0) if len(held) else torch.zeros(D).double())


def test_per_sample_and_mse_losses_are_the_distances_of_samples() -> None:
    z, y, p = loss_case()
    gap = z[:3] - p.value[y[:3]]
    assert float(P.prototype_loss(z, y, p, "per_sample")) == pytest.approx(float(gap.norm(dim=1).sum()))
    assert float(P.prototype_loss(z, y, p, "mse", "mean")) == pytest.approx(float(gap.square().mean()))
    weight = torch.tensor([1.0, 1, 0, 1, 1, 1])
    kept = float(P.prototype_loss(z[[0, 1, 3]], y[[0, 1, 3]], p, "mse", "mean"))
    assert float(P.prototype_loss(z, y, p, "mse", "mean", weight=weight)) == pytest.approx(kept)


def test_padding_of_weight_zero_does_not_change_class_means() -> None:
    z, y, p = loss_case()
    weight = torch.tensor([1.0, 0, 1, 1, 1, 1])
    kept = [0, 2, 3, 4, 5]
    assert float(P.prototype_loss(z, y, p, weight=weight)) == pytest.approx(
        float(P.prototype_loss(z[kept], y[kept], p))
    )


@pytest.mark.parametrize("kind", ["batch_mean", "per_sample"])
def test_repulsion_lowers_the_loss_when_the_wrong_prototype_moves_away(kind) -> None:
    z, y = torch.zeros(1, 2), torch.tensor([0])
    mask = torch.tensor([True, True])
    near, far = (Prototypes(torch.tensor([[1.0, 0.0], [x, 0.0]]), mask) for x in (-1.0, -5.0))
    plain = float(P.prototype_loss(z, y, near, kind))
    assert plain == float(P.prototype_loss(z, y, far, kind)) == pytest.approx(1)
    pushed = float(P.prototype_loss(z, y, near, kind, repulsion=1.0))
    assert pushed == pytest.approx(1 + torch.log(torch.tensor(2.0)).item())
    assert plain < float(P.prototype_loss(z, y, far, kind, repulsion=1.0)) < pushed


@pytest.mark.parametrize("kind", ["batch_mean", "per_sample", "mse"])
def test_losses_map_over_clients(kind) -> None:
    z, y, p = loss_case()
    both = torch.stack([z, z.flip(0)])
    labels = torch.stack([y, y.flip(0)])

    def one(a, b):
        return P.prototype_loss(a, b, p, kind, repulsion=0.5)

    mapped = vmap(grad(one))(both, labels)
    torch.testing.assert_close(mapped[0], grad(one)(z, y))
    torch.testing.assert_close(mapped[0], mapped[1].flip(0))


def test_p12_mixing_uses_the_snapshot() -> None:
    p = sets(4, 0.3)
    order = torch.tensor([2, 0, 3, 1])
    swapped = Prototypes(p.value[order], p.mask[order])
    mixed, again = (X.masked_mix(X.group_weights(s), s) for s in (p, swapped))
    torch.testing.assert_close(again.value, mixed.value[order])
    assert torch.equal(again.mask, mixed.mask[order])


def test_masked_mix_renormalises_over_the_groups_that_hold_a_class() -> None:
    value = torch.tensor([[[1.0]], [[5.0]], [[9.0]]])
    mask = torch.tensor([[True], [False], [True]])
    mixed = X.masked_mix(torch.tensor([[0.2, 0.5, 0.3]]), Prototypes(value, mask))
    assert float(mixed.value) == pytest.approx((0.2 * 1 + 0.3 * 9) / 0.5)
    # only groups that lack the class have weight: nothing is known of it
    assert not X.masked_mix(torch.tensor([[0.0, 1.0, 0.0]]), Prototypes(value, mask)).mask.any()


def test_nearest_prototype_never_names_an_absent_class() -> None:
    p = Prototypes(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([False, True]))
    assert P.nearest_logits(torch.zeros(3, 2), p).argmax(1).tolist() == [1, 1, 1]
