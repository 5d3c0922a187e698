"""SC-FPFL: its properties, numbered; those of its clustering are in test_parts_clustering.py."""

import math

import pytest
import torch
from torch import nn

from coterie.core import tree as T
from coterie.core.method import Batch, Client, Moment, Trained, Upload, replace
from coterie.errors import CoterieError
from coterie.methods import build_method
from coterie.methods.scfpfl.edges import SCFPFLClient, accuracy
from coterie.methods.scfpfl.mended import SCFPFLMended
from coterie.methods.scfpfl.modularity import centred_similarity, divided, information, logit_clusters, modularity
from coterie.methods.scfpfl.settings import SCFPFLMendedSettings, SCFPFLSettings
from coterie.methods.scfpfl.spectral import cluster_count, prediction_clusters, prediction_similarity
from coterie.methods.scfpfl.text import SCFPFL
from coterie.methods.scfpfl.variants import SCFPFLClusterOnly, SCFPFLFourierOnly, SCFPFLNoAgent, SCFPFLNoKL
from coterie.parts.clustering import canonical
from coterie.parts.distill import kl
from coterie.testing import check
from support import short_runs as played
from support.refusals import refuses
from support.short_runs import near, same, state, watch

SMALL = {"join": 1.0, "rounds": 2}
QUICK = {"warmup_epochs": 1}


TEXT = {
    "sc-fpfl": SCFPFL,
    "sc-fpfl-cluster-only": SCFPFLClusterOnly,
    "sc-fpfl-fourier-only": SCFPFLFourierOnly,
    "sc-fpfl-no-agent": SCFPFLNoAgent,
    "sc-fpfl-no-kl": SCFPFLNoKL,
}


def play(name, *model, own=None, **changes):
    return played.play(TEXT.get(name, name), *model, own=own or {}, **changes)


def session(name, *model, own=None, **changes):
    return played.session(TEXT.get(name, name), *model, own=own or {}, **changes)


def mended(own=None, model=None, **changes):
    return played.session(SCFPFLMended, model or played.plain(), own=own or {}, **changes)


def blocks(sizes: tuple[int, ...], seed: int = 0, noise: float = 0.3) -> torch.Tensor:
    """Predictions [clients, items, classes] of clients that agree within their block."""
    rng = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(len(sizes), 60, 5, generator=rng)
    rows = torch.cat([centres[b].expand(n, -1, -1) for b, n in enumerate(sizes)])
    return (rows + noise * torch.randn(rows.shape, generator=rng)).softmax(-1)


def clustered(outputs: torch.Tensor, k0) -> torch.Tensor:
    return prediction_clusters(outputs, SCFPFLSettings(k0=k0), 1)


# ---- clusters ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [(8,), (4, 4), (3, 5, 4), (3, 2, 3, 2), (2, 2, 2, 2, 2)])
@pytest.mark.parametrize("k0", ["eigengap", "true"])
def test_p3_p4_blocks_are_recovered_with_and_without_their_number(sizes, k0) -> None:
    labels = clustered(blocks(sizes), len(sizes) if k0 == "true" else "eigengap")
    assert labels.tolist() == [b for b, n in enumerate(sizes) for _ in range(n)]


def test_p5_clusters_are_equivariant_under_client_permutation() -> None:
    rng = torch.Generator().manual_seed(3)
    for P in (blocks((3, 5, 4)), *(torch.randn(12, 20, 5, generator=rng).softmax(-1) for _ in range(8))):
        order = torch.randperm(12, generator=rng)  # where nothing is separated, the seeded start decides
        whole, mixed = (clustered(p, 3) for p in (P, P[order]))
        assert canonical(whole[order].numpy()).tolist() == mixed.tolist()


def test_eigengap_of_alike_clients_is_one_cluster_where_the_plain_gap_also_is_one_for_two() -> None:
    def similarity(across: float) -> torch.Tensor:
        s = torch.full((10, 10), across)
        s[:5, :5] = s[5:, 5:] = 0.85
        return s.fill_diagonal_(1.0)

    assert [cluster_count(similarity(a)) for a in (0.85, 0.4)] == [1, 2]
    assert [cluster_count(similarity(a), power=1) for a in (0.85, 0.4)] == [1, 1]


def test_a_client_like_nobody_is_no_cluster_when_the_number_is_unknown() -> None:
    P = torch.cat([blocks((4, 4)), blocks((1,), seed=9)])
    labels = clustered(P, "eigengap")
    assert labels[:8].tolist() == [0] * 4 + [1] * 4 and int(labels.max()) == 1
    assert cluster_count(prediction_similarity(P)) == 3


# ---- clusters of the mended version ----------------------------------------------------------------------------------
def block_similarity(sizes: tuple[int, ...], across: float, inside: float = 0.6) -> torch.Tensor:
    label = torch.tensor([b for b, n in enumerate(sizes) for _ in range(n)])
    s = torch.where(label[:, None] == label, inside, across).double()
    return s.fill_diagonal_(1.0)


def test_centred_similarity_does_not_see_what_a_client_says_of_every_item() -> None:
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 40, 6, generator=rng)
    prior = 4 * torch.randn(5, 1, 6, generator=rng)
    assert torch.allclose(centred_similarity(logits), centred_similarity(logits + prior), atol=1e-5)
    assert not torch.allclose(
        prediction_similarity(logits.softmax(-1)), prediction_similarity((logits + prior).softmax(-1))
    )
    assert torch.allclose(centred_similarity(2 * logits), centred_similarity(logits))


def test_modularity_is_that_of_newmans_formula() -> None:
    s = block_similarity((2, 2), across=0.0, inside=1.0)
    assert modularity(s, torch.tensor([0, 0, 1, 1])) == pytest.approx(0.5)
    assert modularity(s, torch.tensor([0, 1, 0, 1])) == pytest.approx(-0.5)
    assert modularity(s, torch.zeros(4, dtype=torch.int64)) == pytest.approx(0.0)


@pytest.mark.parametrize("sizes", [(9,), (6, 6), (5, 4, 3), (3, 3, 3, 3)])
def test_clients_are_divided_where_it_pays_and_not_otherwise(sizes) -> None:
    label = [b for b, n in enumerate(sizes) for _ in range(n)]
    order = torch.randperm(len(label), generator=torch.Generator().manual_seed(5))
    s = block_similarity(sizes, across=0.35)
    assert divided(s, 1).tolist() == label
    assert divided(s[order][:, order], 1).tolist() == canonical(torch.tensor(label)[order].numpy()).tolist()


def test_pairs_of_clusters_that_are_alike_are_divided_again() -> None:
    s = block_similarity((6, 6), across=0.02, inside=0.3)
    for a in (0, 3, 6, 9):
        s[a : a + 3, a : a + 3] = 0.7
    assert divided(s.fill_diagonal_(1.0), 1).tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_clients_that_have_not_learnt_are_not_divided() -> None:
    P = blocks((4, 4)).log()
    faint = 0.05 * P
    assert float(information(P.softmax(-1)).median()) > 0.2 > float(information(faint.softmax(-1)).median())
    assert float(information(torch.full((1, 7, 4), 0.25))) == pytest.approx(0.0, abs=1e-6)

    def labels(logits: torch.Tensor) -> list[int]:
        return logit_clusters(logits, "modularity", 1).tolist()

    assert labels(P) == [0] * 4 + [1] * 4 and labels(faint) == [0] * 8


def test_clusters_are_edges_that_are_disjoint_and_cover_all_clients() -> None:
    loop = play("sc-fpfl", **SMALL, own={"k0": 2, **QUICK})
    edges = loop.method.edges(loop.server)
    members = [i for group in edges.values() for i in group]
    assert sorted(members) == list(loop.method.ctx.clients) and all(edges.values())
    assert loop.events[-1]["facts"]["clusters"] == {str(i): k for k, group in edges.items() for i in group}


def test_who_missed_the_clustering_joins_the_largest_cluster() -> None:
    method = session("sc-fpfl", own={"k0": 2}, clients=6).method
    w = T.drop(method.ctx.w0, method.stays)
    ups = [Upload({**w, "x:predictions": p}, {}, i, 10) for i, p in zip((0, 1, 2, 4, 5), blocks((2, 3)), strict=True)]
    server = method.aggregate(method.setup(), ups, 0)
    assert server.cluster == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}


def test_bytes_are_those_of_the_page() -> None:
    loop = play("sc-fpfl", **SMALL, public=30, own={"k0": 2, **QUICK})
    P, N, K = T.nbytes(loop.method.ctx.w0), 5, len(loop.server.hat)
    opening, first = (e["bytes"] for e in loop.events[:2])
    assert opening["device-cloud"]["up"] == {"model": N * P, "predictions": N * 4 * 10 * 30}
    assert opening["device-cloud"]["down"] == {"model": N * P, "ask": N}
    assert first["device-edge"] == {"up": {"model": N * P}, "down": {"model": N * P}}
    assert first["edge-cloud"] == {"up": {"model": K * P}, "down": {"model": K * P}}
    assert "device-cloud" not in first


# ---- edges and cloud -----------------------------------------------------------------------------------------------
def test_p6_edge_mean_of_equal_models_is_that_model_and_weights_are_samples() -> None:
    loop, seen = watch(session("sc-fpfl-cluster-only", **SMALL, own={"k0": 2, **QUICK}))
    method, edges = loop.method, loop.method.edges(loop.server)
    samples = {i: len(session("sc-fpfl-cluster-only", **SMALL).federation.data(i).train) for i in range(5)}
    for u in seen[-1]:
        members = edges[u.sender]
        expected = T.mean([state(loop, i).f for i in members], [float(samples[i]) for i in members])
        assert near(u.tree, expected, 1e-6)
        equal = [Upload(expected, {}, i, n) for i, n in samples.items()]
        assert near(T.mean([e.tree for e in equal], method.weights(equal)), expected, 1e-6)


def test_p6_the_first_mean_of_a_cluster_is_by_samples_too() -> None:
    method = session("sc-fpfl-cluster-only", own={"k0": 2}, clients=4).method
    trees = [played.jittered(method.ctx.w0, i) for i in range(4)]
    P = blocks((2, 2))
    ups = [Upload({**t, "x:predictions": P[i]}, {}, i, 10 * (i + 1)) for i, t in enumerate(trees)]
    server = method.aggregate(method.setup(), ups, 0)
    assert near(server.hat[1], T.mean(trees[2:], [3.0, 4.0]))
    assert server.samples == {0: 30, 1: 70}


def test_p7_equal_edges_and_one_edge_are_left_as_they_are() -> None:
    method = session("sc-fpfl").method
    w = method.ctx.w0
    assert same(method.mix({0: w}, {0: 5}, 1)[0], w)
    assert all(near(m, w, 1e-6) for m in method.mix({0: w, 1: w, 2: w}, {0: 5, 1: 1, 2: 1}, 1).values())


def test_fourier_step_gives_weights_common_amplitudes_and_averages_the_rest() -> None:
    method = session("sc-fpfl", own={"g": 0.5, "fourier_bias": "mean"}).method
    theta = {k: played.jittered(method.ctx.w0, k) for k in (0, 1)}
    hat = method.mix(theta, {0: 1, 1: 3}, 1)
    assert not near(hat[0], hat[1])
    for name in method.ctx.w0:
        if method.ctx.w0[name].ndim == 1:
            assert torch.allclose(hat[0][name], (theta[0][name] + theta[1][name]) / 2, atol=1e-6)
        else:
            a, b, own = (torch.fft.fft2(t[name].double()) for t in (hat[0], hat[1], theta[0]))
            assert torch.allclose(a.abs(), b.abs(), atol=1e-4)
            assert torch.allclose(torch.cos(a.angle() - own.angle()), torch.ones(()).double(), atol=1e-4)


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))


def test_only_convolution_weights_are_transformed_and_the_rest_stays_the_edges_own() -> None:
    method = session("sc-fpfl", convolutional()).method
    theta = {k: played.jittered(method.ctx.w0, k) for k in (0, 1)}
    hat = method.mix(theta, {0: 1, 1: 3}, 1)
    changed = {name for name in method.ctx.w0 if not torch.equal(hat[0][name], theta[0][name])}
    assert changed == {"0.weight"}


def test_linear_weights_are_transformed_if_there_is_no_convolution() -> None:
    method = session("sc-fpfl", played.plain()).method
    theta = {k: played.jittered(method.ctx.w0, k) for k in (0, 1)}
    hat = method.mix(theta, {0: 1, 1: 3}, 1)
    assert all(torch.equal(hat[0][k], theta[0][k]) == (v.ndim == 1) for k, v in method.ctx.w0.items())


def test_every_fourier_setting_reaches_the_step() -> None:
    net = convolutional()

    def mixed(round: int = 1, **own: object) -> T.Tree:
        m = session("sc-fpfl", net, own=own, rounds=4).method
        theta = {k: played.jittered(m.ctx.w0, k) for k in (0, 1)}
        return m.mix(theta, {0: 1, 1: 3}, round)[0]

    plain = mixed()
    for own in (
        {"g": 0.1}, {"g_schedule": "linear"}, {"fourier_linear": "fourier"}, {"fourier_bias": "mean"},
        {"fourier_mask": "halfopen"}, {"fourier_layout": "prrfl"}, {"fourier_weight": "samples"},
    ):  # fmt: skip
        assert not same(mixed(**own), plain), own
    assert same(mixed(4, g_schedule="linear"), mixed(1, g=0.475))
    through = mixed(fourier_bias="fourier")
    assert bool((through["2.running_var"] > 0).all())
    assert not torch.equal(through["4.bias"], plain["4.bias"])


def test_an_edge_that_nobody_answered_keeps_its_model() -> None:
    loop = play("sc-fpfl", **SMALL, own={"k0": 2, **QUICK})
    method, server = loop.method, loop.server
    new = played.jittered(server.theta[0], 1)
    after = method.aggregate(server, [Upload(new, {}, 0, 10)], 3)
    assert same(after.theta[1], server.theta[1]) and same(after.theta[0], new)
    assert not same(after.hat[1], server.hat[1])  # the other edge's amplitudes moved


# ---- agent ---------------------------------------------------------------------------------------------------------
def test_p12_kl_and_its_gradient_vanish_when_agent_and_own_model_agree() -> None:
    s = session("sc-fpfl", played.plain())
    method, data = s.method, s.federation.data(0)
    start = method.begin(SCFPFLClient(method.ctx.w0), method.ctx.w0, data, 1)
    params, extras = start.model
    batch = Batch(data.train.x[:8], data.train.y[:8], None, start.per_sample[:8])
    leaves = [params[k].requires_grad_() for k in method.ctx.w0]
    pairs = [torch.autograd.grad(f(params, batch, extras), leaves) for f in (method.relearn, method.loss)]
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*pairs, strict=True))
    jittered = played.jittered(method.ctx.w0, 1)
    start = method.begin(SCFPFLClient(jittered), method.ctx.w0, data, 1)
    other, extras = start.model
    batch = batch._replace(per_sample=start.per_sample[:8])
    more = method.relearn(other, batch, extras) - method.loss(other, batch, extras)
    teacher = method.ctx.forward(jittered, batch.x)
    assert more > 0 and torch.isclose(more, kl(teacher, method.ctx.forward(other, batch.x)))


@pytest.mark.parametrize(("lambda1", "kept"), [(1e9, True), (0.0, False)])
def test_p13_a_rejected_agent_leaves_the_own_model_bit_for_bit(lambda1, kept) -> None:
    before, after = (play("sc-fpfl", join=1.0, rounds=r, own={"lambda1": lambda1, **QUICK}) for r in (1, 2))
    for i in range(5):
        assert same(state(before, i).f, state(after, i).f) == kept
    assert after.events[-1]["notes"]["rejected"] == float(kept)


def test_a_rejected_agent_may_leave_local_training_instead() -> None:
    own = {"lambda1": 1e9, **QUICK}
    kept, trained = (play("sc-fpfl", **SMALL, own={**own, "agent_fail": a}) for a in ("keep", "train"))
    each = play("sc-fpfl", **SMALL, own={**own, "local_train_each_round": True})
    assert not same(state(kept, 0).f, state(trained, 0).f)
    # without the agent's success both are plain local training of the own model
    assert same(state(trained, 0).f, state(each, 0).f)


@pytest.mark.parametrize("own", [{"agent_fail": "train"}, {"local_train_each_round": True}])
def test_the_agent_is_judged_against_the_own_model_before_it_trains_instead(own) -> None:
    s = session("sc-fpfl", own=own)
    data, w = s.federation.data(0), s.method.ctx.w0
    others = [play("sc-fpfl", **SMALL), play("local", **SMALL)]
    own_before, own_after = state(others[0], 0).f, state(others[1], 0)["own"]
    _, note = s.method.accept(w, own_after, {"own": own_before, "edge": w}, data)
    rival = own_before if "agent_fail" in own else own_after
    assert note["val_own"] == accuracy(s.method.ctx, rival, data.val)
    assert accuracy(s.method.ctx, own_before, data.val) != accuracy(s.method.ctx, own_after, data.val)


@pytest.mark.parametrize("name", ["sc-fpfl", "sc-fpfl-no-kl", "sc-fpfl-no-agent", "sc-fpfl-cluster-only"])
def test_p14_one_cluster_without_kl_and_with_every_agent_is_fedavg(name) -> None:
    own = {"k0": 1, "warmup_epochs": 0}
    own |= {"lambda1": 0.0} if name in ("sc-fpfl", "sc-fpfl-no-kl") else {}
    own |= {"kl_weight": 0.0} if name == "sc-fpfl" else {}
    ours, fedavg = play(name, **SMALL, own=own), play("fedavg", **SMALL)
    assert near(ours.server.hat[0], fedavg.server["w"], 1e-5)


def test_variants_take_one_step_away() -> None:
    full = play("sc-fpfl", **SMALL, own={"k0": 2, "kl_weight": 0.0, "lambda1": 0.0, **QUICK})
    twins = {
        "sc-fpfl-no-agent": {"k0": 2}, "sc-fpfl-no-kl": {"k0": 2, "lambda1": 0.0},
    }  # fmt: skip
    for name, own in twins.items():
        assert same(state(play(name, **SMALL, own={**own, **QUICK}), 1).f, state(full, 1).f), name
    alone = play("sc-fpfl-fourier-only", **SMALL, public=0, own=QUICK)
    assert alone.method.edges(alone.server) == {i: [i] for i in range(5)}
    only = play("sc-fpfl-cluster-only", **SMALL, val_share=0.0, own={"k0": 2, **QUICK})
    assert all(same(only.server.hat[k], only.server.theta[k]) for k in only.server.hat)


# ---- readings ------------------------------------------------------------------------------------------------------
def test_with_one_cluster_the_edges_model_is_fedavgs_to_the_bit() -> None:
    """Scored as the paper's statement about K = 1 needs it, for the text and for the mend without distillation."""
    own = {"k0": 1, "warmup_epochs": 0, "kl_weight": 0.0, "score": "edge"}
    fedavg = play("fedavg", **SMALL)
    ours = play("sc-fpfl", **SMALL, own={**own, "lambda1": 0.0})
    for loop in (ours, played.play(SCFPFLMended, **SMALL, own=own)):
        for i in range(5):
            scored, _ = loop.method.personal(state(loop, i), played.handed(loop, i), None)
            assert same(scored, fedavg.server["w"])


def test_mended_the_agent_is_taught_only_by_an_own_model_that_beats_the_edges() -> None:
    s = mended()
    method, data = s.method, s.federation.data(0)
    good, bad = state(play("local", played.plain(), rounds=4, join=1.0), 0)["own"], method.ctx.w0
    assert accuracy(method.ctx, good, data.val) > accuracy(method.ctx, bad, data.val)
    for own, edge, lost in ((good, bad, 1.0), (bad, good, 0.0), (bad, bad, 0.0)):
        start = method.begin(SCFPFLClient(own), edge, data, 1)
        params, extras = start.model
        assert float(extras["lost"]) == lost
        taught = start.per_sample[:8] if lost else None
        batch = Batch(data.train.x[:8], data.train.y[:8], None, taught)
        assert (start.per_sample is not None) == bool(lost)
        more = method.relearn(params, batch, extras) - method.loss(params, batch, extras)
        assert (float(more) > 0) == bool(lost)


def test_mended_the_best_of_agent_edge_and_own_is_kept_and_the_agent_is_sent() -> None:
    s = mended()
    method, data = s.method, s.federation.data(0)
    good, bad = state(play("local", played.plain(), rounds=4, join=1.0), 0)["own"], method.ctx.w0
    for agent, edge, own, kept, rejected in (
        (good, bad, bad, good, 0.0), (bad, good, bad, good, 1.0), (bad, bad, good, good, 1.0), (bad, bad, bad, bad, 0.0)
    ):  # fmt: skip
        _, extras = method.begin(SCFPFLClient(own), edge, data, 1).model
        new, upload = method.end(SCFPFLClient(own), Trained(agent, extras), data, 1)
        assert same(new.f, kept) and same(upload.tree, agent) and upload.note["rejected"] == rejected


# ---- when clusters are made ----------------------------------------------------------------------------------------
def test_clusters_at_a_round_ask_everybody_once() -> None:
    loop = play("sc-fpfl", rounds=4, join=0.4, own={"cluster_when": "round:2", "k0": 2, **QUICK})
    asked = ["predictions" in e["bytes"].get("device-cloud", {}).get("up", {}) for e in loop.events]
    assert asked == [False, False, True, False, False]
    assert [len(e["participants"]) for e in loop.events] == [5, 2, 5, 2, 2]
    assert [bool(e["facts"]["clusters"]) for e in loop.events] == [False, False, True, True, True]
    assert loop.method.edges(loop.server) is not None


def test_stationary_clients_are_clustered_in_the_round_after_the_trigger() -> None:
    own = {"cluster_when": "stationary", "eps1": 1e9, "eps2": 0.0, "min_round": 1, "k0": 2, **QUICK}
    loop = play("sc-fpfl", rounds=4, join=1.0, own=own, log_updates=True)
    assert [bool(e["facts"]["clusters"]) for e in loop.events] == [False, False, False, True, True]
    for e in loop.events[:3]:  # what the cloud sees is what was measured
        assert math.isclose(e["facts"]["mean_update"], e["notes"]["aun"], rel_tol=1e-4)
        assert math.isclose(e["facts"]["largest_update"], e["notes"]["largest_update"], rel_tol=1e-4)
    never = play("sc-fpfl", rounds=4, join=1.0, own={**own, "eps1": 0.0})
    assert never.server.cluster == {} and never.method.edges(never.server) is None


@pytest.mark.parametrize("when", ["round:2", "stationary"])
@pytest.mark.parametrize("name", ["payload_is_what_is_declared", "same_bits_after_a_resume", "a_newcomer_gets_a_model"])
@pytest.mark.parametrize("cls", [SCFPFL, SCFPFLMended])
def test_battery_for_later_clusters(cls, when, name) -> None:
    trigger = {"eps1": 1e9, "eps2": 0.0, "min_round": 0} if when == "stationary" else {}
    check(cls, name, cluster_when=when, warmup_epochs=1, **trigger)


# ---- metrics -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "score"), [("sc-fpfl", "own"), ("sc-fpfl", "edge"), ("fedavg", "own")])
def test_p15_aun_is_the_norm_of_the_mean_update_and_at_most_the_mean_norm(name, score) -> None:
    own = {"score": score} if name == "sc-fpfl" else {}
    loop = play(name, **SMALL, log_updates=True, own=own)
    for e in loop.events:
        notes = e["notes"]
        assert 0 < notes["aun"] <= notes["mean_update"] * (1 + 1e-6) <= notes["largest_update"] * (1 + 2e-6)
    if name == "sc-fpfl":
        before = play(name, join=1.0, rounds=1, own=own)
        names = sorted(loop.method.ctx.net.trainable)
        D = [T.flatten(state(loop, i).f, names) - T.flatten(state(before, i).f, names) for i in range(5)]
        assert math.isclose(loop.events[-1]["notes"]["aun"], float(torch.stack(D).mean(0).norm()), rel_tol=1e-5)


def test_the_loss_is_the_mean_loss_of_the_own_models_on_their_training_samples() -> None:
    loop, s = play("sc-fpfl", **SMALL, log_updates=True), session("sc-fpfl", **SMALL)
    losses = []
    for i in range(5):
        train = s.federation.data(i).train
        losses.append(float(s.method.ctx.ce(state(loop, i).f, Batch(train.x, train.y))))
    assert math.isclose(loop.events[-1]["notes"]["train_loss"], sum(losses) / 5, rel_tol=1e-5)
    assert "train_loss" not in play("sc-fpfl", **SMALL).events[-1]["notes"]


def test_the_personal_model_is_the_own_model_and_the_edges_model_is_a_further_view() -> None:
    loop = play("sc-fpfl", **SMALL, final_trained=True, own={"k0": 2, **QUICK})
    for i in range(5):
        client = Client(state(loop, i), played.handed(loop, i), None, 2)
        assert same(loop.method.model("personal", client).params, state(loop, i).f)
        edge = loop.method.model("edge", client).params
        assert same(edge, loop.server.hat[loop.server.cluster[i]]) and not same(edge, state(loop, i).f)
    assert {"personal/test", "edge/test"} <= loop.events[-1]["eval"].keys()


def test_p15_aun_of_updates_that_cancel_is_zero() -> None:
    from coterie.engine.evaluation import notes
    from coterie.engine.messages import TrainAnswer

    move = torch.tensor([3.0, 4.0])
    answers = [TrainAnswer(i, {}, {}, 1, 1, 0.0, update=u) for i, u in enumerate((move, -move))]
    found = notes(answers)
    assert found == {"aun": 0.0, "mean_update": 5.0, "largest_update": 5.0}


# ---- what cannot work ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("sc-fpfl", {"public": 0}, "SC-FPFL needs a public set"),
        ("sc-fpfl", {"val_share": 0.0}, "SC-FPFL needs a validation part"),
        ("sc-fpfl-fourier-only", {"val_share": 0.0}, "needs a validation part"),
        ("sc-fpfl-cluster-only", {"public": 0}, "needs a public set"),
        ("sc-fpfl", {"own": {"k0": 6}}, "k0 = 6 is more than the 5 clients"),
        ("sc-fpfl", {"own": {"cluster_when": "round:9"}}, "after the last of 3 rounds"),
        ("sc-fpfl", {"own": {"cluster_when": "stationary", "min_round": 2}}, "after round 4 at the earliest"),
    ],
)
def test_what_cannot_work_gets_a_sentence(name, changes, words) -> None:
    with pytest.raises(CoterieError, match=words):
        session(name, **changes)


@pytest.mark.parametrize("bad", [{"cluster_when": "later"}, {"k0": 0}, {"k0": "many"}, {"g": 0.6}, {"lambda1": -1}])
def test_settings_out_of_range_are_refused(bad) -> None:
    with pytest.raises(CoterieError, match=next(iter(bad))):
        build_method(SCFPFL, bad)


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        (SCFPFLSettings, {"eps1": 0.3}, "eps1 = 0.3 has no effect unless cluster_when = stationary"),
        (SCFPFLSettings, {"min_round": 3, "cluster_when": "round:2"}, "cluster_when = stationary"),
        (SCFPFLSettings, {"g_last": 0.4}, "g_last = 0.4 has no effect unless g_schedule = linear"),
        (SCFPFLSettings, {"gap_power": 2.0, "k0": 3}, "k0 or embed_dim = eigengap"),
        (SCFPFLSettings, {"split": "axis", "isodata": "off"}, "isodata = paper or classic"),
        (SCFPFLSettings, {"m_min": 0.2}, "m_min = 0.2 has no effect unless isodata = classic"),
        (SCFPFLSettings, {"agent_fail": "train", "local_train_each_round": True}, "local_train_each_round = false"),
        (SCFPFLMendedSettings, {"g_last": 0.4}, "g_schedule = linear"),
    ],
)
def test_a_setting_without_effect_is_refused(settings, given, words) -> None:
    with pytest.raises(CoterieError, match=words):
        settings(**given)
    assert settings(**settings().model_dump()) == settings()  # all defaults, written out, are no mistake


def test_defaults_are_those_of_the_text() -> None:
    hp = SCFPFLSettings()
    assert (hp.score, hp.split, hp.isodata, hp.predict, hp.cluster_when) == ("own", "all", "paper", "softmax", "start")
    assert not hp.local_train_each_round and hp.kl_weight == 1.0 and hp.lambda1 > 0
    assert (hp.fourier_linear, hp.fourier_bias, hp.fourier_weight) == ("auto", "keep", "uniform")


# ---- who did not answer, and who answers wrongly -------------------------------------------------------------------
def test_if_nobody_answers_round_0_everybody_is_asked_in_round_1() -> None:
    method = session("sc-fpfl", own={"k0": 2}, clients=5).method
    server = method.setup()
    assert method.sample(server, 1, torch.Generator()) == [0, 1, 2, 3, 4]
    assert "x:ask" in method.down(server, [0], 1).to(0)
    ups = [Upload({**method.ctx.w0, "x:predictions": p}, {}, i, 10) for i, p in enumerate(blocks((2, 3)))]
    server = method.aggregate(server, ups, 1)
    assert server.cluster == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1} and not method.asks(server, 2)


@pytest.mark.parametrize("who", [[0], [1, 4], [0, 2, 3]])
@pytest.mark.parametrize("name", ["sc-fpfl", "sc-fpfl-fourier-only"])
def test_any_subset_may_answer_round_0(who, name) -> None:
    method = session(name, clients=5).method
    P = blocks((5,), seed=4)
    ups = [Upload({**played.jittered(method.ctx.w0, i), "x:predictions": P[i]}, {}, i, 10) for i in who]
    server = method.aggregate(method.setup(), ups, 0)
    assert set(server.cluster) == set(range(5)) and set(server.cluster.values()) == set(server.hat)
    sent = method.down(server, range(5), 1)
    for k, hat in sent.edge.items():
        method.schema("edge_down", Moment(server, k, 1)).check(hat, "the download")


def test_a_wrong_upload_is_refused() -> None:
    method = session("sc-fpfl", public=30).method
    now = Moment(method.setup(), 0, 0)
    good = {**method.ctx.w0, "x:predictions": torch.full((30, 10), 0.1)}
    refuses(
        method.schema("up", now),
        good,
        ({"x:predictions": torch.full((30, 10), 1.5)}, "1.5 in x:predictions, outside 0 to 1"),
        ({"x:predictions": torch.full((30, 10), -0.1)}, "-0.1 in x:predictions"),
        ({"x:predictions": torch.full((29, 10), 0.1)}, "of shape"),
        ({"x:labels": torch.zeros(3)}, "x:labels' that is not declared"),
    )
    later = replace(method.setup(), cluster=dict.fromkeys(range(5), 0))
    with pytest.raises(CoterieError, match="x:predictions' that is not declared"):
        method.schema("up", Moment(later, 0, 1)).check(good, "the upload")
    refuses(method.schema("edge_up", Moment(later, 0, 1)), dict(method.ctx.w0))


def test_predictions_of_nothing_are_clustered_too() -> None:
    method = session("sc-fpfl", clients=5, public=30).method
    P = [torch.zeros(30, 10), *torch.full((4, 30, 10), 0.1)]
    ups = [Upload({**method.ctx.w0, "x:predictions": p}, {}, i, 10) for i, p in enumerate(P)]
    assert set(method.aggregate(method.setup(), ups, 0).cluster) == set(range(5))
