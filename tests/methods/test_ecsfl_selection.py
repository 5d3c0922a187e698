"""ECS-FL: how devices are measured and selected."""

import math

import pytest
import torch
import torch.nn.functional as F

from coterie.errors import CoterieError
from coterie.methods.ecsfl import selection as Se
from coterie.parts.similarity import inverse_distances, mix

RNG = torch.Generator().manual_seed(0)
W0 = {"a": torch.randn(3, 4, generator=RNG).double(), "b": torch.randn(5, generator=RNG).double()}
SCALE = torch.tensor([1.0, 0.2, 3.0, 0.5, 2.0, 0.7]).double()
MODELS = {
    k: v + SCALE.reshape(-1, *[1] * v.ndim) * F.normalize(torch.randn(6, *v.shape, generator=RNG).double(), dim=0)
    for k, v in W0.items()
}
DIST = Se.model_distances(MODELS, W0)
IDS = [10, 11, 12, 13, 14, 15]


def inverse_weights(d: torch.Tensor) -> torch.Tensor:
    raw = inverse_distances(d.double())
    return raw / raw.sum()


def test_distance_is_the_euclidean_norm_of_the_update() -> None:
    flat = torch.cat([(MODELS[k] - W0[k]).flatten(1) for k in W0], 1)
    torch.testing.assert_close(DIST, flat.norm(dim=1))
    steps = torch.arange(1, 7)
    torch.testing.assert_close(Se.model_distances(MODELS, W0, "per_step", steps), DIST / steps)
    want = sum((MODELS[k] - W0[k]).flatten(1).square().mean(1) for k in W0).sqrt()
    torch.testing.assert_close(Se.model_distances(MODELS, W0, "per_param_layer"), want)


def test_p1_inverse_weights_are_positive_sum_to_one_and_equal_distances_give_the_mean() -> None:
    a = inverse_weights(DIST)
    assert float(a.min()) > 0 and float(a.sum()) == pytest.approx(1)
    torch.testing.assert_close(inverse_weights(torch.full((4,), 0.3)), torch.full((4,), 0.25).double())


def test_p2_weights_do_not_change_when_all_distances_are_scaled() -> None:
    torch.testing.assert_close(inverse_weights(7 * DIST), inverse_weights(DIST))


def test_p3_selecting_all_and_averaging_is_the_plain_mean() -> None:
    picked = Se.select(DIST, IDS, Se.select_count(1.0, 6))
    assert picked == list(range(6))
    mean = mix(torch.full((1, 6), 1 / 6).double(), {k: v[picked] for k, v in MODELS.items()})
    for k, v in MODELS.items():
        torch.testing.assert_close(mean[k][0], v.mean(0))


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.34, 0.5, 1.0])
def test_p4_size_of_the_selection_and_nearest_inside(fraction) -> None:
    picked = Se.select(DIST, IDS, Se.select_count(fraction, 6))
    assert len(picked) == min(6, max(1, math.ceil(fraction * 6)))
    rest = [i for i in range(6) if i not in picked]
    assert not rest or float(DIST[picked].max()) <= float(DIST[rest].min())
    assert len(Se.select(DIST[:2], IDS[:2], 5)) == 2


def test_count_forgives_rounding() -> None:
    assert [Se.select_count(0.07, 100), Se.select_count(0.1, 100), Se.select_count(0.1, 5)] == [7, 10, 1]
    with pytest.raises(CoterieError, match="select_fraction"):
        Se.select_count(0, 10)


@pytest.mark.parametrize("rule", ["nearest", "farthest", "random"])
def test_p5_selection_is_invariant_to_device_order_with_ties_by_id(rule) -> None:
    d = torch.tensor([1.0, 1, 1, 2, 2, 3])
    base = {IDS[i] for i in Se.select(d, IDS, 2, rule, rng=torch.Generator().manual_seed(4))}
    if rule == "nearest":
        assert base == {10, 11}
    if rule == "farthest":
        assert base == {15, 13}
    for seed in range(5):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
        ids = [IDS[i] for i in order]
        picked = Se.select(d[order], ids, 2, rule, rng=torch.Generator().manual_seed(4))
        assert {ids[i] for i in picked} == base


def test_p5_selection_is_invariant_to_a_common_permutation_of_parameters() -> None:
    order = torch.randperm(5, generator=RNG)
    again = Se.model_distances({**MODELS, "b": MODELS["b"][:, order]}, {**W0, "b": W0["b"][order]})
    assert Se.select(again, IDS, 3) == Se.select(DIST, IDS, 3)


def test_p6_a_common_shift_changes_no_distance_and_shifts_the_result() -> None:
    shift = {k: torch.randn(v.shape, generator=RNG).double() for k, v in W0.items()}
    moved = {k: v + shift[k] for k, v in MODELS.items()}
    again = Se.model_distances(moved, {k: v + shift[k] for k, v in W0.items()})
    torch.testing.assert_close(again, DIST)
    rows = inverse_weights(DIST)[None]
    for k, v in mix(rows, MODELS).items():
        torch.testing.assert_close(mix(rows, moved)[k], v + shift[k])


def test_p7_a_device_without_update_is_never_selected_and_no_weight_is_infinite() -> None:
    d = torch.tensor([0.0, 0.5, math.nan, math.inf, 1e-13, 0.9])
    for rule in ("nearest", "farthest", "random"):
        assert Se.select(d, IDS, 6, rule, rng=RNG) == [1, 5]
    assert Se.select(torch.zeros(3), IDS[:3], 2) == []
    assert torch.isfinite(inverse_weights(torch.tensor([0.0, 1.0]))).all()


def test_p10_an_outlier_has_no_influence_or_less_than_a_thousandth() -> None:
    d = torch.tensor([0.01, 0.012, 0.011, 10.1])
    assert 3 not in Se.select(d, IDS[:4], 3)
    a = inverse_weights(d)
    assert float(a[3]) < float(a.max()) / 1000


def test_p12_the_result_lies_in_the_hull_of_the_selected() -> None:
    picked = Se.select(DIST, IDS, 3)
    chosen = {k: v[picked] for k, v in MODELS.items()}
    for rows in (torch.full((1, 3), 1 / 3), inverse_weights(DIST[picked])[None]):
        for k, v in mix(rows, chosen).items():
            assert bool((v[0] <= chosen[k].amax(0) + 1e-7).all() and (v[0] >= chosen[k].amin(0) - 1e-7).all())


# ---- herding ---------------------------------------------------------------------------------------------------------
def gap(x: torch.Tensor, rows: list[int]) -> float:
    return float((x[rows].mean(0) - x.mean(0)).norm())


@pytest.mark.parametrize("count", [1, 2, 4, 10, 19])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_a_herd_is_nearer_to_that_of_all_than_random_ones_are_on_average(count: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 12, generator=rng) + 3 * torch.randn(1, 12, generator=rng)
    drawn = [gap(x, torch.randperm(20, generator=rng)[:count].tolist()) for _ in range(200)]
    herd = Se.herd(x, count)
    assert len(set(herd)) == count and gap(x, herd) < sum(drawn) / len(drawn)


def test_a_herd_is_greedy_and_the_whole_herd_has_the_mean() -> None:
    x = torch.tensor([[0.0], [4.0], [6.0], [14.0]])
    assert Se.herd(x, 3) == [2, 1, 3]  # 6 is the mean; 5 with 4, 8 with 4 and 14 (10/3 with 4 and 0)
    assert sorted(Se.herd(x, 9)) == [0, 1, 2, 3] and gap(x, Se.herd(x, 4)) == 0


def test_projections_keep_inner_products_on_average_and_are_the_same_for_everybody() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 400, generator=rng)

    def both(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(Se.projected(v, 64, torch.Generator().manual_seed(seed)) for v in (a, b))

    found = torch.stack([p @ q for p, q in map(both, range(300))])
    assert abs(float(found.mean() - a.double() @ b.double())) < 4 * float(found.std()) / 300**0.5
    p, q = both(1)
    both_at_once = Se.projected(a + b, 64, torch.Generator().manual_seed(1))
    assert torch.allclose(p + q, both_at_once, atol=1e-5) and torch.equal(p, both(1)[0])
