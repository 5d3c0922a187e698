"""FedDBE, FedPAC, FedAS, FedTGP, Floco, kNN-Per, pFedFDA and pFedHN held to their papers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from coterie.core import tree as T
from coterie.core.method import Batch, Upload
from coterie.errors import CoterieError
from coterie.methods.fedas import FISHER
from coterie.methods.fedpac import combination
from coterie.methods.fedtgp import made, slope, widest_gap
from coterie.methods.floco import on_simplex, placed, riesz
from coterie.methods.pfedfda import Fold, definite, discriminant
from coterie.parts.small_layers import linear
from coterie.testing import CHECKS, SmallNet, check
from support.short_runs import HEAD, bound, jittered, near, plain, play, same, session, size, state, traffic, watch


# ---- kNN-Per ---------------------------------------------------------------------------------------------------------
def test_knn_per_trains_as_fedavg_and_without_neighbours_predicts_as_it() -> None:
    s = session("knn-per", own={"share": 0.0})
    loop, _ = watch(s)
    assert same(loop.server["w"], play("fedavg").server["w"])
    data, x = s.federation.data(0), s.federation.test(0).x
    params, store = s.method.personal({}, loop.server["w"], data)
    assert torch.allclose(s.method.predict(params, x, store), s.method.ctx.forward(params, x).log_softmax(1), atol=1e-5)


def test_knn_per_with_one_neighbour_knows_its_training_samples_by_heart() -> None:
    s = session("knn-per", own={"share": 1.0, "k": 1})
    data = s.federation.data(1)
    params, store = s.method.personal({}, s.method.ctx.w0, data)
    assert torch.equal(s.method.predict(params, data.train.x, store).argmax(1), data.train.y)


def test_knn_per_chooses_the_first_share_that_is_best_on_validation_data() -> None:
    s = session("knn-per")
    data = s.federation.data(0)
    params, store = s.method.personal({}, s.method.ctx.w0, data)
    hits = [int((s.method.mixed(params, data.val.x, store, i / 10).argmax(1) == data.val.y).sum()) for i in range(11)]
    assert store["share"] == hits.index(max(hits)) / 10


# ---- FedDBE ----------------------------------------------------------------------------------------------------------
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


# ---- FedPAC ----------------------------------------------------------------------------------------------------------
def test_fedpac_weighs_equal_clients_by_one_over_variance_and_leaves_strangers_out() -> None:
    same_, variances = torch.ones(3, 2, 4).double(), torch.tensor([1.0, 2.0, 4.0]).double()
    assert combination(0, same_, variances) == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=1e-6)
    apart = 100 * torch.eye(3).double()[:, None]
    for i in range(3):
        assert combination(i, apart, variances) == pytest.approx([float(j == i) for j in range(3)], abs=1e-3)


def test_fedpac_weights_are_better_than_any_others_on_the_simplex() -> None:
    rng = torch.Generator().manual_seed(0)
    vectors, variances = torch.rand(6, 3, 4, generator=rng).double(), torch.rand(6, generator=rng).double()
    gaps = (vectors[2] - vectors).flatten(1)
    P = torch.diag(variances) + gaps @ gaps.T
    a = torch.tensor(combination(2, vectors, variances)).double()
    others = torch.distributions.Dirichlet(torch.full((6,), 0.3).double()).sample((2000,))
    assert a.min() >= 0 and float(a.sum()) == pytest.approx(1, abs=0.01)
    assert float(a @ P @ a / a.sum() ** 2) <= float(((others @ P) * others).sum(1).min()) + 1e-6


def test_fedpac_hands_every_participant_a_head_of_its_own_and_others_the_first() -> None:
    loop = play("fedpac", rounds=1)
    heads, first = loop.server["heads"], loop.method.ctx.w0
    assert len(heads) == 3 and all(set(h) == HEAD for h in heads.values())
    sent = loop.method.down(loop.server, list(range(5)), 2)
    for i in range(5):
        personal, _ = loop.method.personal({}, sent.to(i), session("fedpac").federation.data(i))
        assert same({k: personal[k] for k in HEAD}, heads.get(i, {k: first[k] for k in HEAD}))
    assert not same(*list(heads.values())[:2])


# ---- FedAS -----------------------------------------------------------------------------------------------------------
def test_fedas_without_alignment_trains_as_fedper() -> None:
    _, aligned = watch(session("fedas", own={"align_epochs": 0}, rounds=1))
    _, per = watch(session("fedper", rounds=1))
    for a, b in zip(aligned[0], per[0], strict=True):
        assert same(T.drop(a.tree, FISHER.__eq__), b.tree)


def test_fedas_averages_bodies_by_fisher_traces() -> None:
    method = bound("fedas")
    server = method.setup()
    bodies = [jittered(server["w"], i) for i in (1, 2)]
    uploads = [Upload({**b, FISHER: torch.tensor([1.0 + 2 * i])}, {}, i, 10) for i, b in enumerate(bodies)]
    assert near(method.aggregate(server, uploads, 1)["w"], T.mean(bodies, [1, 3]))
    none = [Upload({**b, FISHER: torch.zeros(1)}, {}, i, 10) for i, b in enumerate(bodies)]
    assert near(method.aggregate(server, none, 1)["w"], T.mean(bodies))


# ---- FedTGP ----------------------------------------------------------------------------------------------------------
def test_fedtgp_slope_is_the_gradient_of_its_loss() -> None:
    rng = torch.Generator().manual_seed(0)
    net = {"embedding": torch.randn(5, 7, generator=rng), **linear("1", 7, 7, rng), **linear("2", 7, 7, rng)}
    z, y = torch.randn(9, 7, generator=rng), torch.randint(5, (9,), generator=rng)
    leaves = {k: v.clone().requires_grad_() for k, v in net.items()}
    loss = F.cross_entropy(-torch.cdist(z, made(leaves)) - 2.0 * F.one_hot(y, 5), y)
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert near(slope(net, z, y, 2.0), expected)


def test_fedtgp_margin_is_the_widest_gap_between_neighbouring_classes() -> None:
    z = torch.tensor([[0.0], [1.0], [4.0], [5.0], [5.0]])
    assert widest_gap(z, torch.tensor([0, 1, 2, 3, 3]), 6) == pytest.approx(1.0)
    assert widest_gap(z, torch.tensor([0, 0, 2, 2, 2]), 6) == pytest.approx(14 / 3 - 0.5)
    assert widest_gap(z, torch.zeros(5, dtype=torch.long), 6) == float("inf")


def test_fedtgp_makes_prototypes_for_all_classes_that_are_closest_to_their_own_means() -> None:
    s = session("fedtgp", own={"server_epochs": 100}, rounds=2, join=1.0)
    loop, seen = watch(s)
    rows = [(u.tree["x:means"], u.tree["x:labels"].long()) for u in seen[-1]]
    z, y = torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])
    closest = torch.cdist(z, loop.server["prototypes"]).argmin(1)
    assert float((closest == y).float().mean()) > 0.5


# ---- Floco -----------------------------------------------------------------------------------------------------------
def test_floco_projects_onto_the_simplex() -> None:
    points = np.array([[0.2, 0.3, 0.5], [2.0, 0.0, 0.0], [-1.0, 0.4, 0.5]])
    found = on_simplex(points, 1.0)
    assert np.allclose(found, [[0.2, 0.3, 0.5], [1, 0, 0], [0, 0.45, 0.55]])


def test_floco_places_clients_in_the_simplex_as_evenly_as_it_can() -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(2, 30))
    updates = np.stack([centres[i % 2] + 0.01 * rng.normal(size=30) for i in range(6)])
    at = placed(updates, 4)
    assert np.allclose(at.sum(1), 1) and (at >= 0).all()
    tried = [on_simplex(PCA(4).fit_transform(updates), z) / z for z in (0.001, 0.01, 0.1, 0.3, 1.0)]
    assert all(riesz(at) <= riesz(t) * 1.001 for t in tried)
    assert np.allclose(placed(updates[:1], 4), 0.25)


def test_floco_calls_everybody_in_the_round_that_places_them_and_trains_around_the_place_after_it() -> None:
    s = session("floco", own={"tau": 2, "endpoints": 3, "rho": 0.0}, rounds=3, join=0.4)
    loop, seen = watch(s)
    assert [len(u) for u in seen] == [2, 5, 2] and sorted(loop.server["places"]) == list(range(5))
    place = loop.server["places"][0]
    params, extras = s.method.personal({}, s.method.down(loop.server, [0], 4).to(0), s.federation.data(0))
    weight = sum(p * w for p, w in zip(place, loop.server["w"]["x:endpoints"], strict=True))
    assert not extras and torch.allclose(params["classifier.weight"], weight, atol=1e-6)
    assert float(place.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.long  # points are drawn by client number, and places magnify that, so numbers do matter
@pytest.mark.parametrize("name", [n for n in CHECKS if n != "permuting_ids_permutes_results"])
def test_floco_passes_the_battery_after_its_placement(name: str) -> None:
    check("floco", name, tau=1, endpoints=3)


# ---- pFedFDA ---------------------------------------------------------------------------------------------------------
def test_pfedfda_head_is_linear_discriminant_analysis() -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    z = torch.randn(60, 4, generator=rng).double() + 2 * F.one_hot(y, 4)
    means = torch.stack([z[y == k].mean(0) for k in range(3)])
    covariance = sum(torch.cov(z[y == k].T, correction=0) for k in range(3)) / 3
    weight, bias = discriminant(means, covariance, torch.full((3,), 1 / 3).double())
    ours = (z @ weight.T + bias).softmax(1)
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(z.numpy(), y.numpy()).predict_proba(z.numpy())
    assert np.allclose(ours.numpy(), theirs, atol=0.03)


def test_pfedfda_losses_of_a_fold_are_those_of_its_mixtures() -> None:
    rng = torch.Generator().manual_seed(1)
    draw = torch.randn(4, 40, 6, generator=rng).double()
    own, shared = ((draw[i, :5], draw[i].T @ draw[i] / 40 + torch.eye(6).double()) for i in (0, 1))
    z, y, prior = draw[2], torch.arange(40) % 5, torch.full((5,), 0.2).double()
    pairs = torch.tensor([[0.0, 0.0], [0.3, 0.8], [1.0, 1.0]]).double()
    expected = []
    for a, b in pairs.tolist():
        weight, bias = discriminant(a * own[0] + (1 - a) * shared[0], b * own[1] + (1 - b) * shared[1], prior)
        expected.append(float(F.cross_entropy(z @ weight.T + bias, y)))
    assert Fold(own, shared, prior, z, y).losses(pairs).tolist() == pytest.approx(expected)


def test_pfedfda_mends_a_covariance_that_uploads_have_spoiled() -> None:
    good = torch.eye(4) + 0.1
    assert definite(good) is good
    bad = torch.diag(torch.tensor([1.0, -2.0, 0.0, 3.0]))
    assert float(torch.linalg.eigvalsh(definite(bad)).min()) > 0.5


def test_pfedfda_never_sends_the_head_and_needs_its_bias() -> None:
    _, seen = watch(session("pfedfda", rounds=1))
    assert not any(HEAD & u.tree.keys() for u in seen[0])
    model = SmallNet()
    model.classifier = torch.nn.Linear(16, 10, bias=False)
    with pytest.raises(CoterieError, match="bias"):
        session("pfedfda", model)


# ---- pFedHN ----------------------------------------------------------------------------------------------------------
def test_pfedhn_makes_one_model_at_first_and_different_ones_later() -> None:
    method = bound("pfedhn", plain())
    first = method.setup()
    models = [method.model(first["net"], i) for i in range(5)]
    assert all(torch.equal(models[0], m) for m in models[1:])
    after = play("pfedhn", plain(), join=1.0).server["net"]
    assert not torch.allclose(method.model(after, 0), method.model(after, 1), atol=1e-5)
    newcomer = {**after, "embedding": after["embedding"].mean(0, keepdim=True).expand(5, -1)}
    assert torch.allclose(method.model(after, 99), method.model(newcomer, 0), atol=1e-6)


def test_pfedhn_does_not_move_when_nobody_moved() -> None:
    method = bound("pfedhn")
    server = method.setup()
    sent = method.down(server, [0, 3], 1)
    after = method.aggregate(server, [Upload(sent.to(i), {}, i, 10) for i in (0, 3)], 1)
    assert near(after["net"], server["net"])


def test_pfedhn_hyper_network_never_travels() -> None:
    loop = play("pfedhn")
    assert traffic(loop, "up") == traffic(loop, "down") == [size(loop.method.ctx.w0)] * 3
