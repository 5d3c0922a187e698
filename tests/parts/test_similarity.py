"""FedCPMD, properties 10 and 11, and the mixing rules of pFedSim, FedCMD, FedAP and FedAMP."""

import math

import pytest
import torch

from coterie.errors import CoterieError
from coterie.parts import similarity as S

RNG = torch.Generator().manual_seed(0)
X = torch.randn(6, 40, generator=RNG)


def test_p10_phi_is_symmetric_in_01_with_unit_diagonal_and_rows_sum_to_one() -> None:
    phi = S.map_similarity(S.cosine(X))
    assert torch.equal(phi, phi.T)
    assert float(phi.min()) >= 0 and float(phi.max()) <= 1
    torch.testing.assert_close(phi.diagonal(), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-6)
    rows = S.normalise_rows(phi, torch.eye(6))
    torch.testing.assert_close(rows.sum(1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-12)


def test_cosine_matches_torch_across_chunks(monkeypatch) -> None:
    monkeypatch.setattr(S, "COLUMNS", 7)
    want = torch.nn.functional.cosine_similarity(X[:, None].double(), X[None, :4].double(), dim=2)
    torch.testing.assert_close(S.cosine(X, X[:4]), want, rtol=0, atol=1e-8)
    torch.testing.assert_close(S.cosine(X)[:, :4], want, rtol=0, atol=1e-8)
    assert not S.cosine(torch.zeros(2, 3)).any()


def test_row_cosine_is_the_mean_of_cosines_per_row() -> None:
    w = X.reshape(6, 8, 5)
    want = torch.stack([S.cosine(w[:, r]) for r in range(8)]).mean(0)
    torch.testing.assert_close(S.cosine_rows(w), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(S.cosine_rows(w, w[:2]), want[:, :2], rtol=0, atol=1e-12)


def test_maps_of_negative_cosines() -> None:
    c = torch.tensor([-0.5, 0.5])
    assert S.map_similarity(c).tolist() == [0, 0.5]
    assert S.map_similarity(c, "shift01").tolist() == [0.25, 0.75]
    assert S.map_similarity(c, "abs").tolist() == [0.5, 0.5]


def test_p11_identical_personal_layers_give_the_plain_mean_of_bodies() -> None:
    bodies = {"a": torch.randn(4, 3, 2, generator=RNG), "b": torch.randn(4, 5, generator=RNG)}
    phi = S.map_similarity(S.cosine(X[:1].expand(4, -1)))
    mixed = S.mix(S.normalise_rows(phi, torch.eye(4)), bodies)
    for k, v in bodies.items():
        torch.testing.assert_close(mixed[k], v.mean(0).expand_as(v), rtol=0, atol=1e-6)


def test_p11_one_participant_gets_its_own_body_bit_for_bit() -> None:
    body = {"a": torch.randn(1, 3, 2, generator=RNG), "b": torch.randn(1, 5, generator=RNG)}
    mixed = S.mix(S.normalise_rows(S.map_similarity(S.cosine(X[:1])), torch.eye(1)), body)
    assert all(torch.equal(mixed[k], v) for k, v in body.items())


def test_mix_is_the_weighted_sum_of_models_and_leaves_them_alone() -> None:
    stacked = {"a": torch.randn(3, 2, 2, dtype=torch.float64), "b": torch.randn(3, 4, dtype=torch.float64)}
    before = {k: v.clone() for k, v in stacked.items()}
    rows = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    mixed = S.mix(rows, stacked)
    for k, v in stacked.items():
        want = torch.stack([sum(rows[i, j] * v[j] for j in range(3)) for i in range(2)])
        torch.testing.assert_close(mixed[k], want, rtol=0, atol=1e-14)
        assert torch.equal(v, before[k]) and mixed[k].dtype == v.dtype
    assert torch.equal(mixed["a"][1], stacked["a"][0])


def test_rows_that_sum_to_zero_take_the_fallback() -> None:
    w = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert S.normalise_rows(w, torch.tensor([0.9, 0.1])).tolist() == [
        [pytest.approx(0.9), pytest.approx(0.1)],
        [0.25, 0.75],
    ]


def test_softmax_rows_over_known_entries_only() -> None:
    s = torch.tensor([[1.0, 0.0], [0.3, 0.7]])
    assert float(S.softmax_rows(s)[0, 0]) == pytest.approx(math.e / (math.e + 1))
    known = torch.tensor([[True, False], [False, False]])
    assert S.softmax_rows(s, known=known).tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_self_weight_is_on_the_diagonal_and_rows_sum_to_one() -> None:
    affinity = S.inverse_distances(S.pairwise_sqdist(X).sqrt())
    rows = S.with_self(affinity, 0.5)
    torch.testing.assert_close(rows.sum(1), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(rows.diagonal(), torch.full((6,), 0.5, dtype=torch.float64))
    assert torch.equal(S.with_self(affinity, 1.0), torch.eye(6, dtype=torch.float64))
    assert S.with_self(torch.zeros(1, 1), 0.3).item() == pytest.approx(1)
    with pytest.raises(CoterieError, match="self weight"):
        S.with_self(affinity, 1.5)


def test_pfedsim_identical_heads_give_equal_weights_and_orthogonal_heads_none() -> None:
    equal = S.neg_log_weights(S.cosine(torch.ones(3, 5)))
    torch.testing.assert_close(equal, equal[0, 0].expand(3, 3))
    alone = S.neg_log_weights(S.cosine(torch.eye(3)))
    assert torch.equal(alone > 0, torch.eye(3) > 0)
    assert float(alone[0, 0]) == pytest.approx(-math.log(1e-4))


def test_pairwise_distances_keep_the_digits_of_near_models() -> None:
    far = torch.full((3, 1000), 100.0, dtype=torch.float64)
    far[1, 0] += 1e-3
    far[2, 1] += 2e-3
    d = S.pairwise_sqdist(far)
    assert float(d[0, 1]) == pytest.approx(1e-6, rel=1e-6) and float(d[1, 2]) == pytest.approx(5e-6, rel=1e-6)
    assert not d.diagonal().any() and torch.equal(d, d.T)
    torch.testing.assert_close(S.pairwise_sqdist(X, X[:3]), torch.cdist(X, X[:3]).double() ** 2, rtol=1e-5, atol=1e-4)


def test_sketch_is_common_to_all_who_share_the_generator_and_keeps_cosines() -> None:
    big = torch.randn(3, 500, generator=RNG)
    big[1] = big[0] + 0.1 * big[1]
    a = S.sketch(big, 256, torch.Generator().manual_seed(5))
    b = S.sketch(big[1:2], 256, torch.Generator().manual_seed(5))
    torch.testing.assert_close(a[1:2], b, rtol=0, atol=1e-5)
    assert float((S.cosine(a) - S.cosine(big)).abs().max()) < 0.2
