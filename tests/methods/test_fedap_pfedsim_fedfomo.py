"""FedAP, pFedSim, FedFomo held to their papers."""

from typing import Any

import pytest
import torch
from torch import nn

from coterie.core import tree as T
from coterie.core.method import Method, Upload
from coterie.methods import pfedsim
from coterie.methods.fedap import FedAP
from coterie.methods.fedfomo import FedFomo
from coterie.methods.pfedsim import PFedSim
from coterie.parts import model_bank as bank
from support.short_runs import BN, HEAD, bound, jittered, near, play, same, session, size, state, traffic, upload, watch

CLIENTS = range(5)


def shared(method: Method, seed: int) -> T.Tree:
    """A model as a client would upload it."""
    return T.drop(jittered(method.ctx.w0, seed), method.stays)


# ---- FedAP -----------------------------------------------------------------------------------------------------------
def fedap(**own: Any) -> tuple[FedAP, dict[str, Any]]:
    """A server after the exchange; everybody has sent a model of its own since."""
    method = bound("fedap", own=own)
    assert isinstance(method, FedAP)
    stats = {i: jittered({"s": torch.zeros(2, 24)}, i, 1.0)["s"] for i in CLIENTS}
    stored = bank.fill(T.drop(method.ctx.w0, method.stays), CLIENTS)
    return method, {"bank": bank.put(stored, {i: shared(method, i) for i in CLIENTS}), "stats": stats}


def test_fedap_rows_sum_to_one_with_mu_on_the_diagonal() -> None:
    method, server = fedap(mu=0.3)
    X = method.mixing(server)
    assert torch.allclose(X.sum(1), torch.ones(5).double()) and bool((X >= 0).all())
    assert torch.allclose(X.diagonal(), torch.full((5,), 0.3).double())


def test_fedap_weights_are_inverse_distances_of_means_and_deviations() -> None:
    method, server = fedap(mu=0.5)
    S = torch.stack([server["stats"][i] for i in CLIENTS]).double().flatten(1)
    near_ = torch.stack([1 / (S[0] - S[j]).norm() for j in range(1, 5)])
    assert torch.allclose(method.mixing(server)[0, 1:], 0.5 * near_ / near_.sum())


def test_fedap_identical_statistics_give_equal_weights_to_the_others() -> None:
    method, server = fedap(mu=0.5)
    X = method.mixing({**server, "stats": dict.fromkeys(CLIENTS, server["stats"][0])})
    assert torch.allclose(X[0, 1:], torch.full((4,), 0.125).double())
    rows = {i: server["stats"][min(i, 1)] * 1000 for i in CLIENTS}  # four alike, far from the first
    assert torch.allclose(method.mixing({**server, "stats": rows})[1, 2:], torch.full((3,), 0.5 / 3).double())


def test_fedap_who_sent_no_statistics_mixes_with_nobody() -> None:
    method, server = fedap()
    X = method.mixing({**server, "stats": {i: s for i, s in server["stats"].items() if i != 2}})
    assert torch.equal(X[2], torch.eye(5).double()[2]) and float(X[:, 2].sum()) == 1


def test_fedap_mixes_from_a_snapshot() -> None:
    method, server = fedap()
    alone, together = method.down(server, [3], 5).to(3), method.down(server, list(CLIENTS), 5).to(3)
    assert near(alone, together)
    V = server["bank"]["flat"]
    assert torch.allclose(T.flatten(together), method.mixing(server)[3].float() @ V, atol=1e-6)


def test_fedap_with_mu_one_is_local_after_the_opening_exchange() -> None:
    ap, local = play("fedap", own={"mu": 1.0, "warm": 0.0}), play("local")
    like = T.drop(ap.method.ctx.w0, BN.__contains__)
    for i in (i for i in CLIENTS if state(local, i)):
        own = T.unflatten(ap.server["bank"]["flat"][i], like)
        assert same({**own, **state(ap, i)["own"]}, {k: state(local, i)["own"][k] for k in [*like, *sorted(BN)]})


def test_fedap_is_fedbn_before_the_exchange_and_never_sends_batch_norm() -> None:
    s = session("fedap", rounds=5)
    loop, seen = watch(s)
    assert [len(u) for u in seen] == [3, 3, 5, 3, 3]
    assert not any(BN & u.tree.keys() for round in seen for u in round)
    _, bn = watch(session("fedbn", rounds=2))
    assert all(same(a.tree, b.tree) for r in (0, 1) for a, b in zip(seen[r], bn[r], strict=True))
    w = size(s.method.ctx.w0) - size(s.method.ctx.w0, BN)
    assert traffic(loop, "down") == [w] * 5
    assert traffic(loop, "up") == [w, w, 2 * 24 * 4, w, w]


def test_fedap_statistics_are_means_and_deviations_of_what_enters_batch_norm() -> None:
    s = session("fedap", own={"warm": 0.0})
    data = s.federation.data(1)
    params, extras = s.method.begin(s.method.init_client(data), T.drop(s.method.ctx.w0, BN.__contains__), data, 0)
    entering = nn.functional.linear(data.train.x.flatten(1), params["fc1.weight"], params["fc1.bias"])
    expected = torch.stack([entering.mean(0), entering.std(0, correction=0)])
    assert torch.allclose(extras["stats"], expected, atol=1e-5)


# ---- pFedSim ---------------------------------------------------------------------------------------------------------
def test_pfedsim_with_rho_one_is_fedavg() -> None:
    assert same(play("pfedsim", own={"rho": 1.0}).server["w"], play("fedavg").server["w"])


def test_pfedsim_with_rho_zero_and_orthogonal_heads_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfedsim, "cosine_rows", lambda heads: torch.zeros(len(heads), len(heads)).double())
    sim, local = play("pfedsim", own={"rho": 0.0}), play("local")
    assert all(same(state(sim, i)["w"], state(local, i)["own"]) for i in CLIENTS if state(local, i))


def second_phase(*heads: torch.Tensor) -> tuple[PFedSim, dict[str, Any]]:
    """A server whose first clients have just sent these classifiers."""
    method = bound("pfedsim", own={"rho": 0.0})
    assert isinstance(method, PFedSim)
    trees = [{**jittered(method.ctx.w0, i), "classifier.weight": h} for i, h in enumerate(heads)]
    return method, method.aggregate(method.setup(), [upload(method, i, t) for i, t in enumerate(trees)], 1)


def test_pfedsim_identical_heads_weigh_equally_and_orthogonal_ones_nothing() -> None:
    a, b = torch.zeros(10, 16), torch.zeros(10, 16)
    a[:, 0], b[:, 1] = 2.0, 3.0
    method, server = second_phase(a, 5 * a, b)
    X = method.mixing(server["similarity"], torch.arange(5))
    expected = torch.tensor([[0.5, 0.5, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [0, 0, 1, 0, 0]]).double()
    assert torch.allclose(X[:3], expected, atol=1e-9)
    assert torch.allclose(X.sum(1), torch.ones(5).double()) and bool((X >= 0).all())


def test_pfedsim_weights_follow_the_paper_and_negative_cosines_weigh_nothing() -> None:
    a, b = torch.zeros(10, 16), torch.zeros(10, 16)
    a[:, 0], b[:, 0], b[:, 1] = 1.0, 1.0, 1.0
    b[5:] = 0  # five classes at 45 degrees, five without direction: s = 0.5 / sqrt(2)
    method, server = second_phase(a, b, -a)
    assert float(server["similarity"][0, 1]) == pytest.approx(0.5**0.5 / 2, abs=1e-6)
    assert float(server["similarity"][0, 2]) == 0
    own, other = -torch.log(torch.tensor(1e-4).double()), -torch.log(torch.tensor(1 - 0.5**0.5 / 2).double())
    assert float(method.mixing(server["similarity"], torch.tensor([0]))[0, 1]) == pytest.approx(
        float(other / (own + other)), abs=1e-6
    )


def test_pfedsim_renews_only_pairs_that_answered_together() -> None:
    h = [torch.randn(10, 16, generator=torch.Generator().manual_seed(i)).abs() for i in range(3)]
    method, server = second_phase(*h)
    tree = {**jittered(method.ctx.w0, 9), "classifier.weight": -h[0]}
    after = method.aggregate(server, [upload(method, 0, tree), upload(method, 3, tree)], 2)
    old, new = server["similarity"], after["similarity"]
    assert torch.equal(old[:3, :3][1:, 1:], new[:3, :3][1:, 1:]) and torch.equal(old[0, 1:3], new[0, 1:3])
    assert float(new[0, 3]) == pytest.approx(1.0, abs=1e-6) and float(new[1, 3]) == 0


def test_pfedsim_never_mixes_heads_and_hands_the_general_one_over_once() -> None:
    h = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).abs()
    method, server = second_phase(h, h)
    sent = method.down(server, [0, 4, 99], 2)
    assert sent.to(0).keys() == method.ctx.w0.keys() - HEAD
    assert same(sent.to(4), server["w"]) and same(sent.to(99), server["w"])
    V = server["bank"]["flat"]
    mean = T.unflatten((V[0] + V[1]) / 2, server["w"])
    assert near(sent.to(0), T.drop(mean, HEAD.__contains__), 1e-5)


def test_pfedsim_counts_the_whole_model_up_and_the_body_down_in_its_second_phase() -> None:
    s = session("pfedsim", rounds=6, join=1.0)
    loop, _ = watch(s)
    w = size(s.method.ctx.w0)
    assert traffic(loop, "up") == [w] * 6
    assert traffic(loop, "down") == [w, w, w, w, *[w - size(s.method.ctx.w0, HEAD)] * 2]
    assert s.method.global_model(loop.server) is None


def test_pfedsim_scores_the_last_trained_model_or_the_mixture() -> None:
    loop = play("pfedsim", own={"rho": 0.0}, join=1.0)
    data = session("pfedsim").federation.data(0)
    sent = loop.method.down(loop.server, [0], 4).to(0)
    assert same(loop.method.personal(state(loop, 0), sent, data)[0], state(loop, 0)["w"])
    mixed = bound("pfedsim", own={"score": "mixed"}).personal(state(loop, 0), sent, data)[0]
    assert torch.equal(mixed["fc1.weight"], sent["fc1.weight"])
    assert torch.equal(mixed["classifier.weight"], state(loop, 0)["w"]["classifier.weight"])


# ---- FedFomo ---------------------------------------------------------------------------------------------------------
def test_fedfomo_without_models_of_others_is_local() -> None:
    fomo, local = play("fedfomo", own={"models": 0}), play("local")
    assert all(same(state(fomo, i)["w"], state(local, i)["own"]) for i in CLIENTS if state(local, i))


def fomo_client() -> tuple[FedFomo, Any, T.Tree, T.Tree]:
    """A method, a client's data, a start and a model that is better on its validation part."""
    s = session("fedfomo", join=1.0, rounds=2)
    loop, _ = watch(s)
    assert isinstance(s.method, FedFomo)
    return s.method, s.federation.data(0), s.method.ctx.w0, state(loop, 0)["w"]


def test_fedfomo_keeps_its_model_when_no_candidate_helps() -> None:
    method, data, start, better = fomo_client()
    begun, extras = method.begin({"w": start, "old": better}, {"models": T.flatten(start)[None]}, data, 3)
    assert same(begun, start) and float(extras["affinity"][0]) < 0


def test_fedfomo_candidate_equal_to_the_old_model_weighs_nothing() -> None:
    method, data, start, better = fomo_client()
    sent = torch.stack([T.flatten(start), T.flatten(better)])
    begun, extras = method.begin({"w": start, "old": start}, {"models": sent}, data, 3)
    assert float(extras["affinity"][0]) == 0 and float(extras["affinity"][1]) > 0
    assert same(begun, better)


def test_fedfomo_baseline_is_the_model_before_the_last_training_so_own_training_counts() -> None:
    method, data, start, better = fomo_client()
    begun, _ = method.begin({"w": better, "old": start}, {"models": T.flatten(better)[None]}, data, 3)
    assert near(begun, better)
    half = {k: (v + start[k]) / 2 for k, v in better.items()}
    raw = method.affinities([half, better], start, data).clamp(min=0)
    mixed, _ = method.begin({"w": better, "old": start}, {"models": T.flatten(half)[None]}, data, 3)
    assert near(mixed, T.mean([half, better], raw)) and bool((raw > 0).all())


def test_fedfomo_harmful_candidate_weighs_nothing_beside_a_helpful_one() -> None:
    method, data, start, better = fomo_client()
    worse = {k: 2 * start[k] - v for k, v in better.items()}  # as far to the other side
    begun, extras = method.begin({"w": better, "old": start}, {"models": T.flatten(worse)[None]}, data, 3)
    assert float(extras["affinity"][0]) < 0 and same(begun, better)


def test_fedfomo_remembers_where_its_last_training_started() -> None:
    loop = play("fedfomo", join=1.0, rounds=1)
    assert same(state(loop, 0)["old"], loop.method.ctx.w0)
    assert not torch.equal(state(loop, 0)["w"]["fc1.weight"], loop.method.ctx.w0["fc1.weight"])


def test_fedfomo_affinity_is_loss_gained_per_distance() -> None:
    method, data, start, better = fomo_client()
    losses = [nn.functional.cross_entropy(method.ctx.forward(w, data.val.x), data.val.y) for w in (start, better)]
    distance = torch.cat([(better[k] - start[k]).flatten() for k in sorted(method.ctx.net.trainable)]).norm()
    found = method.affinities([better], start, data)
    assert float(found[0]) == pytest.approx(float((losses[0] - losses[1]) / (distance + 1e-5)), rel=1e-4)


def test_fedfomo_server_adds_affinities_and_sends_the_most_helpful() -> None:
    method = bound("fedfomo", own={"models": 2, "explore": 0.0})
    assert isinstance(method, FedFomo)
    server = method.aggregate(method.setup(), [upload(method, i, shared(method, i)) for i in CLIENTS], 1)
    t = next(t for t in range(2, 50) if method.sent_to(server, 1, t) != sorted(method.sent_to(server, 1, t)))
    picked = method.sent_to(server, 1, t)
    assert len(picked) == 2 and 1 not in picked
    sent = Upload({**shared(method, 7), "x:affinity": torch.tensor([2.0, -1.0])}, {}, 1, 10)
    after = method.aggregate(server, [sent], t)
    assert float(after["similarity"][1, picked[0]]) == 2 and float(after["similarity"][1, picked[1]]) == -1
    assert method.sent_to(after, 1, 60)[0] == picked[0] and picked[1] not in method.sent_to(after, 1, 60)
    assert torch.equal(after["bank"]["flat"][1], T.flatten(shared(method, 7)))


def test_fedfomo_explores_at_first_and_asks_for_no_more_models_than_there_are() -> None:
    method = bound("fedfomo", own={"models": 1, "explore": 1.0, "explore_decay": 0.5})
    many = bound("fedfomo", own={"models": 50})
    assert isinstance(method, FedFomo) and isinstance(many, FedFomo)
    server = method.aggregate(method.setup(), [upload(method, i, shared(method, i)) for i in CLIENTS], 1)
    server["similarity"][0, 3] = 5.0
    assert all(method.sent_to(server, 0, t) == [3] for t in range(3, 20))
    drawn = {
        method.sent_to({**server, "bank": {**server["bank"], "ids": [*range(i, i + 5)]}}, i, 1)[0] for i in range(20)
    }
    assert drawn - {3}
    assert sorted(many.sent_to(server, 2, 2)) == [0, 1, 3, 4]
    assert many.sent_to(many.setup(), 2, 1) == [] and not many.down(many.setup(), [2], 1).each


def test_fedfomo_counts_models_down_and_affinities_up() -> None:
    s = session("fedfomo", own={"models": 2}, join=1.0)
    loop, _ = watch(s)
    w = size(s.method.ctx.w0)
    assert traffic(loop, "down") == [0, 2 * w, 2 * w] and traffic(loop, "up") == [w, w + 8, w + 8]


def test_fedfomo_validation_part_is_fixed_and_not_trained_on() -> None:
    f = session("fedfomo").federation
    for i in CLIENTS:
        assert not set(f.indices(i, "val").tolist()) & set(f.indices(i, "train").tolist())
        assert torch.equal(f.data(i).val.x, session("fedfomo").federation.data(i).val.x)
