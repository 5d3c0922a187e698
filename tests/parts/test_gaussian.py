"""Gaussians, distances between them and layer scores: properties 1-7 of FedCPMD."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import CoterieError
from coterie.parts import gaussian as G
from coterie.parts.gaussian import Gaussian

# mu1, sigma1, mu2, sigma2: w2, hellinger, bhattacharyya, js, js_sqrt, js_moment (computed to 16 digits elsewhere)
VECTORS = [
    ((0, 1, 0, 1), (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
    ((0, 1, 1, 1), (1.0, 0.3427872480349941, 0.125, 0.1114214821847362, 0.333798565282621, 0.1115717756571049)),
    (
        (0, 1, 0, 2),
        (1.0, 0.3249196962329063, 0.1115717756571049, 0.09273338166641253, 0.3045215619072195, 0.1115717756571049),
    ),
    (
        (0, 1, 2, 3),
        (
            2.82842712474619,
            0.5469149383444212,
            0.3554128118829953,
            0.2429461628058814,
            0.492895691608155,
            0.3465735902799727,
        ),
    ),
    (
        (0.5, 0.29, 0.13, 0.31),
        (
            0.3705401462729781,
            0.4170127158717219,
            0.1910389695039859,
            0.1609411597153616,
            0.4011747246716343,
            0.1621005815616138,
        ),
    ),
    (
        (0.45, 0.3, 0.02, 0.05),
        (
            0.4973932046178355,
            0.8090059186998969,
            1.062735361157842,
            0.5066315337051411,
            0.7117805375992948,
            0.9094440683081538,
        ),
    ),
    (
        (-1, 0.5, 4, 2.5),
        (
            5.385164807134504,
            0.873444305549903,
            1.43929418405218,
            0.5818075366199406,
            0.7627630933782393,
            1.014074123646143,
        ),
    ),
    ((0, 1, 10, 1), (10.0, 0.999998136671678, 12.5, 0.6931463173939845, 0.8325540927735473, 1.629048269010741)),
    (
        (0.5, 0.25, 0.5, 0.001),
        (
            0.249,
            0.9542316261962684,
            2.414164868587151,
            0.6671269442256782,
            0.8167783935840114,
            2.414164868587151,
        ),
    ),
]
NAMES = list(G.DISTANCES)
PAPER = ["js", "w2", "hellinger", "bhattacharyya"]


def g(mu: object, sigma: object) -> Gaussian:
    return Gaussian(torch.as_tensor(mu, dtype=torch.float64), torch.as_tensor(sigma, dtype=torch.float64))


def test_p1_distances_equal_the_test_vectors() -> None:
    given_ = torch.tensor([v for v, _ in VECTORS], dtype=torch.float64)
    want = torch.tensor([w for _, w in VECTORS], dtype=torch.float64)
    p, q = g(given_[:, 0], given_[:, 1]), g(given_[:, 2], given_[:, 3])
    got = [G.w2(p, q), G.hellinger(p, q), G.bhattacharyya(p, q), G.js(p, q), G.js(p, q, sqrt=True), G.js_moment(p, q)]
    torch.testing.assert_close(torch.stack(got, 1), want, rtol=0, atol=1e-12)


gaussians = st.tuples(st.floats(-5, 5), st.floats(1e-3, 5))


@settings(max_examples=60, deadline=None)
@given(gaussians, gaussians, st.sampled_from(NAMES))
def test_p1_distance_to_itself_is_zero_and_distances_are_symmetric(a, b, name) -> None:
    d = G.DISTANCES[name]
    p, q = g(*a), g(*b)
    assert float(d(p, p)) == 0
    assert float(d(p, q)) == float(d(q, p))


@settings(max_examples=60, deadline=None)
@given(gaussians, gaussians)
def test_p2_ranges_and_relations(a, b) -> None:
    p, q = g(*a), g(*b)
    js = float(G.js(p, q))
    assert 0 <= js <= math.log(2)
    assert js <= float(G.js_moment(p, q)) + 1e-12
    h = float(G.hellinger(p, q))
    assert 0 <= h <= 1
    assert h * h == pytest.approx(1 - math.exp(-float(G.bhattacharyya(p, q))), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(gaussians, gaussians, st.floats(-3, 3), st.floats(0.1, 10), st.sampled_from(PAPER))
def test_p3_shift_and_scale(a, b, shift, c, name) -> None:
    d = G.DISTANCES[name]
    base = float(d(g(*a), g(*b)))
    moved = float(d(g(a[0] + shift, a[1]), g(b[0] + shift, b[1])))
    scaled = float(d(g(a[0] * c, a[1] * c), g(b[0] * c, b[1] * c)))
    # near zero the root of Hellinger magnifies the rounding of the shifted means
    assert moved == pytest.approx(base, rel=1e-8, abs=1e-6)
    assert scaled == pytest.approx(base * c if name == "w2" else base, rel=1e-8, abs=1e-6)


def test_js_agrees_with_a_fine_integral_at_extreme_ratios() -> None:
    p, q = g(0.3, 1e-3), g(0.0, 2.0)
    x = torch.linspace(-20, 20, 1_000_001, dtype=torch.float64)
    a = torch.distributions.Normal(p.mu, p.sigma).log_prob(x)
    b = torch.distributions.Normal(q.mu, q.sigma).log_prob(x)
    m = torch.logaddexp(a, b) - math.log(2)
    fine = float(((a.exp() * (a - m) + b.exp() * (b - m)) / 2).sum()) * 4e-5
    assert float(G.js(p, q)) == pytest.approx(fine, abs=1e-12)


def test_fit_is_moments_of_the_normalised_tensor() -> None:
    t = torch.randn(7, 5, dtype=torch.float64) * 3 + 1
    u = (t - t.min()) / (t.max() - t.min())
    mu, sigma = G.fit(t)
    assert float(mu) == pytest.approx(float(u.mean()), abs=1e-14)
    assert float(sigma) == pytest.approx(float(u.std(correction=0)), abs=1e-14)
    assert G.fit(t, "none").mu == pytest.approx(float(t.mean()))
    assert float(G.fit(t, "zscore").sigma) == pytest.approx(1)
    batched = G.fit(torch.stack([t, 2 * t + 1]), batch_dims=1)
    torch.testing.assert_close(batched.mu, mu.expand(2), rtol=0, atol=1e-14)
    columns = G.fit(t, per_dim=True)
    torch.testing.assert_close(columns.mu, u.mean(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(columns.sigma, u.std(0, correction=0), rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.stack(G.pooled(columns)), torch.stack([mu, sigma]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("normalize", ["minmax", "zscore"])
def test_fit_of_a_constant_tensor_is_zero_with_the_floor(normalize) -> None:
    mu, sigma = G.fit(torch.full((4, 3), 7.0), normalize)
    assert float(mu) == 0 and float(sigma) == 1e-3


def fit_labels(y, classes, encoding="index"):
    return G.fit(G.encode_labels(y, classes, encoding), "none")


def test_labels_use_the_range_of_all_classes_not_of_the_client() -> None:
    mu, sigma = fit_labels(torch.tensor([3, 3, 3]), 10)
    assert float(mu) == pytest.approx(3 / 9) and float(sigma) == 1e-3
    assert G.encode_labels(torch.tensor([0]), 1).item() == 0
    assert float(fit_labels(torch.tensor([1, 0]), 4, "onehot").mu) == pytest.approx(0.25)


def scores(outputs, x, y, name="js", score="eq7"):
    d = G.distance(name)
    z_x, z_y = G.fit(x), fit_labels(y, 10)
    fits = [G.fit(o) for o in outputs]
    return G.layer_scores(torch.stack([d(f, z_y) for f in fits]), torch.stack([d(f, z_x) for f in fits]), score)


def sample(seed=0):
    rng = torch.Generator().manual_seed(seed)
    outputs = [torch.randn(30, w, generator=rng).relu() ** p for w, p in ((20, 1), (12, 2), (8, 1), (10, 3))]
    return outputs, torch.rand(30, 50, generator=rng) ** 2, torch.randint(0, 10, (30,), generator=rng)


@pytest.mark.parametrize("name", PAPER)
def test_p4_choice_is_invariant_to_positive_affine_maps(name) -> None:
    outputs, x, y = sample()
    base = scores(outputs, x, y, name)
    for layer in range(4):
        changed = [o * 3.5 - 2 if i == layer else o for i, o in enumerate(outputs)]
        torch.testing.assert_close(scores(changed, x, y, name), base, rtol=0, atol=1e-6)
    torch.testing.assert_close(scores(outputs, x * 255 + 4, y, name), base, rtol=0, atol=1e-6)


@pytest.mark.parametrize("score", ["eq7", "absdiff"])
def test_p5_equal_neighbours_have_score_zero_and_are_chosen(score) -> None:
    outputs, x, y = sample()
    s = scores([outputs[0], outputs[1], outputs[1], outputs[3]], x, y, score=score)
    assert s[1] == 0 and s[0] > 0 and s[2] > 0
    assert int(G.best_layer(s)) == 1


def test_p6_scores_do_not_depend_on_the_order_of_samples() -> None:
    outputs, x, y = sample()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    base = scores(outputs, x, y)
    torch.testing.assert_close(scores([o[order] for o in outputs], x[order], y[order]), base, rtol=0, atol=1e-12)


def test_eq7_and_absdiff_differ_only_for_opposite_signs() -> None:
    to_y = torch.tensor([0.0, 1.0, 0.0])
    to_x = torch.tensor([0.0, 3.0, 4.0])
    assert G.layer_scores(to_y, to_x).tolist() == [2.0, 2.0]
    assert G.layer_scores(to_y, to_x, "absdiff").tolist() == [2.0, 0.0]


def test_p7_mode_of_votes_and_tie_rules() -> None:
    votes = torch.tensor([[1, 3, 2], [2, 2, 1], [2, 2, 2], [2, 0, 2], [2, 2, 0]])
    mean = torch.tensor([[0.0, 9, 0], [0.1, 0.2, 0], [0.3, 0.3, 0.3], [0.1, 0.0, 0.4], [math.nan, 0.4, 0]])
    assert G.winner(votes, mean).tolist() == [1, 0, 2, 0, 1]
    assert G.winner(votes, mean, "deepest").tolist() == [1, 1, 2, 2, 1]
    assert G.winner(votes, mean, "fc2").tolist() == [1, 1, 1, 2, 1]
    unseen = torch.full((3,), math.nan)
    assert int(G.winner(torch.tensor([2, 2, 0]), unseen)) == 1


def test_options_of_distances_are_bound_by_name() -> None:
    p, q = g(0, 1), g(2, 3)
    assert float(G.distance("w2", w2_sigma=False)(p, q)) == 2
    assert float(G.distance("js", js_sqrt=True)(p, q)) == pytest.approx(0.492895691608155)
    with pytest.raises(CoterieError, match="hellinger"):
        G.distance("helinger")


def test_diag_mean_averages_equal_shapes_and_pools_others() -> None:
    p, q = g([0.0, 1.0], [1.0, 1.0]), g([1.0, 4.0], [1.0, 1.0])
    assert float(G.diag_mean(G.w2, p, q)) == 2
    assert float(G.diag_mean(G.w2, p, g([0.5], [math.sqrt(1.25)]))) == pytest.approx(0)
