"""FedDyn, FedBN, FedBABU, LG-FedAvg, FedALA held to their papers."""

from typing import Any

import pytest
import torch
from torch import nn

from coterie.core import tree as T
from coterie.core.method import Batch
from coterie.errors import CoterieError
from coterie.methods import build
from coterie.methods.fedala import FedALA, merged
from coterie.methods.fedbn import FedBN
from coterie.parts import batch_norm as norms
from support.short_runs import (
    BN,
    HEAD,
    bound,
    jittered,
    near,
    plain,
    play,
    same,
    session,
    size,
    state,
    traffic,
    upload,
    watch,
)

CLIENTS = range(5)


# ---- FedDyn ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clip", [None, 10.0])
def test_feddyn_first_uploads_are_those_of_fedprox(clip: float | None) -> None:
    _, dyn = watch(session("feddyn", own={"alpha": 0.3, "clip": clip}, rounds=1))
    _, prox = watch(session("fedprox", own={"mu": 0.3}, rounds=1))
    assert all(same(a.tree, b.tree) for a, b in zip(dyn[0], prox[0], strict=True))


def test_feddyn_server_dual_is_the_mean_of_all_client_duals_under_partial_participation() -> None:
    loop = play("feddyn", rounds=4, join=0.4)
    duals = [state(loop, i)["h"] for i in CLIENTS if state(loop, i) is not None]
    for k, hbar in loop.server["hbar"].items():
        assert torch.allclose(hbar, sum(h[k] for h in duals) / 5, atol=1e-6), k
        assert bool(hbar.abs().sum() > 0), k


def test_feddyn_sends_average_plus_dual_and_scores_the_average() -> None:
    loop = play("feddyn")
    method, server = loop.method, loop.server
    for k, h in server["hbar"].items():
        assert torch.equal(server["w"][k], server["avg"][k] + h)
    data = session("feddyn").federation.data(0)
    sent, handed = method.down(server, [0], 4).to(0), method.deliver(server, [0], 4).to(0)
    assert same(sent, server["w"])
    assert same(method.personal(state(loop, 0) or method.init_client(data), handed, data)[0], server["avg"])
    assert same(method.begin(method.init_client(data), handed, data, 4)[0], server["w"])
    assert method.global_model(server) is server["avg"]


def test_feddyn_does_not_move_when_nobody_moved() -> None:
    method = bound("feddyn")
    server = method.setup()
    after = method.aggregate(server, [upload(method, i, server["w"]) for i in range(3)], 1)
    assert same(after["w"], server["w"])


def test_feddyn_penalty_has_the_gradient_of_the_paper() -> None:
    s = session("feddyn", own={"alpha": 0.5})
    method, data = s.method, s.federation.data(0)
    h = {k: torch.full_like(v, 0.25) for k, v in method.init_client(data)["h"].items()}
    start, extras = method.begin({"h": h}, method.ctx.w0, data, 1)
    there = {k: (v + 0.125).requires_grad_(k in h) for k, v in start.items()}
    batch = Batch(data.train.x[:8], data.train.y[:8])
    names = sorted(h)
    with_penalty, without = (
        torch.autograd.grad(loss, [there[k] for k in names])
        for loss in (method.loss(there, batch, extras), method.ctx.ce(there, batch))
    )
    for k, a, b in zip(names, with_penalty, without, strict=True):
        assert torch.allclose(a - b, torch.full_like(a, 0.5 * 0.25 + 0.5 * 0.125), atol=1e-5), k


def test_feddyn_weighs_participants_equally_and_divides_the_dual_by_all_clients() -> None:
    method = bound("feddyn")
    server = method.setup()
    models = [jittered(server["w"], i) for i in (1, 2)]
    after = method.aggregate(server, [upload(method, 0, models[0], 90), upload(method, 1, models[1], 10)], 1)
    assert near(after["avg"], T.mean(models))
    moved = T.sub(T.mean(models), server["w"])
    assert near(after["hbar"], {k: moved[k] * 2 / 5 for k in after["hbar"]})


@pytest.mark.parametrize("alpha", [0, -0.1])
def test_feddyn_rejects_an_alpha_that_is_not_positive(alpha: float) -> None:
    with pytest.raises(CoterieError, match="alpha"):
        build("feddyn", {"alpha": alpha})


def test_feddyn_can_scale_alpha_by_relative_sample_counts() -> None:
    s = session("feddyn", own={"scale_alpha": True}, rounds=1)
    loop, seen = watch(s)
    assert [len(u) for u in seen] == [5, 3] and not seen[0][0].tree
    n = s.federation.sizes("train")[:5]
    sent = s.method.down(loop.server, [0, 1], 1)
    for i in (0, 1):
        data = s.federation.data(i)
        _, extras = s.method.begin(s.method.init_client(data), sent.to(i), data, 1)
        assert extras["alpha"] == pytest.approx(0.01 / (n[i] * 5 / n.sum()), rel=1e-5)
    assert traffic(loop, "down")[1] == size(s.method.ctx.w0) + 4


# ---- FedBN -----------------------------------------------------------------------------------------------------------
class FedBNAnywhere(FedBN):
    needs = ()


def test_fedbn_without_batch_norm_is_fedavg() -> None:
    bn, avg = play(FedBNAnywhere, plain()), play("fedavg", plain())
    assert same(bn.server["w"], avg.server["w"])


def test_fedbn_asks_for_batch_norm_in_a_sentence() -> None:
    with pytest.raises(CoterieError, match="FedBN needs a model with batch norm"):
        session("fedbn", plain())


def test_fedbn_clients_differ_in_batch_norm_only() -> None:
    s = session("fedbn", join=1.0)
    loop, seen = watch(s)
    trees = [s.method.personal(state(loop, i), loop.server["w"], s.federation.data(i))[0] for i in (0, 1)]
    assert {k for k in trees[0] if not torch.equal(trees[0][k], trees[1][k])} == BN
    assert not any(BN & u.tree.keys() for round in seen for u in round)
    assert traffic(loop, "up") == traffic(loop, "down") == [size(s.method.ctx.w0) - size(s.method.ctx.w0, BN)] * 3


def test_fedbn_newcomer_starts_from_the_initial_batch_norm_and_is_scored_with_its_own_statistics() -> None:
    s = session("fedbn")
    loop, _ = watch(s)
    data = s.federation.data(4)
    fresh = s.method.init_client(data)
    begun, _ = s.method.begin(fresh, loop.server["w"], data, 4)
    scored, _ = s.method.personal(fresh, loop.server["w"], data)
    assert all(torch.equal(begun[k], s.method.ctx.w0[k]) for k in BN)
    entering = nn.functional.linear(data.train.x.flatten(1), begun["fc1.weight"], begun["fc1.bias"])
    assert torch.allclose(scored["bn1.running_mean"], entering.mean(0), atol=1e-5)
    assert torch.allclose(scored["bn1.running_var"], entering.var(0, correction=0), atol=1e-5)


def test_input_moments_merge_batches_with_the_between_batch_term(monkeypatch: pytest.MonkeyPatch) -> None:
    s = session("fedbn")
    net, w, x = s.method.ctx.net, s.method.ctx.w0, s.federation.data(0).train.x
    monkeypatch.setattr(norms, "CHUNK", 7)
    found = norms.input_moments(net, w, x, ["bn1"])[0]
    entering = nn.functional.linear(x.flatten(1), w["fc1.weight"], w["fc1.bias"]).double()
    assert torch.allclose(found.mean, entering.mean(0), atol=1e-6)
    assert torch.allclose(found.var, entering.var(0, correction=0), atol=1e-6)


# ---- FedBABU ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", [{"optimizer": "adam", "lr": 0.01}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_fedbabu_head_is_the_initial_one_to_the_bit(rule: dict[str, Any]) -> None:
    loop = play("fedbabu", **rule)
    w0 = loop.method.ctx.w0
    whole = loop.method.global_model(loop.server)
    assert whole is not None and all(torch.equal(whole[k], w0[k]) for k in HEAD)
    assert all(torch.equal(state(loop, i)["own"][k], w0[k]) for i in CLIENTS if state(loop, i) for k in HEAD)
    assert all(not torch.equal(whole[k], w0[k]) for k in whole if k not in HEAD)


def test_fedbabu_is_fedrep_without_head_epochs_under_a_common_head() -> None:
    babu = play("fedbabu")
    rep = play("fedrep", own={"head_epochs": 0, "body_epochs": 1}, weighting="uniform")
    assert same(babu.server["w"], rep.server["w"])


def test_fedbabu_without_fine_tuning_is_the_global_model_and_fine_tuning_never_feeds_back() -> None:
    s = session("fedbabu", own={"finetune_epochs": 0}, eval_every=1)
    none, _ = watch(s)
    assert s.method.adapt() == []
    data = s.federation.data(0)
    whole = s.method.global_model(none.server)
    assert whole is not None
    assert same(s.method.personal(s.method.init_client(data), none.server["w"], data)[0], whole)
    tuned = play("fedbabu", eval_every=1)
    assert same(none.server["w"], tuned.server["w"])
    assert tuned.events[-1]["eval"]["adapted/test"] != tuned.events[-1]["eval"]["personal/test"]  # type: ignore[attr-defined]


def test_fedbabu_fine_tunes_all_or_the_head_for_the_epochs_asked() -> None:
    (whole,) = bound("fedbabu").adapt()
    (head,) = bound("fedbabu", own={"finetune": "head", "finetune_epochs": 2}).adapt()
    assert whole.epochs == 5 and whole.trains("fc1.weight") and whole.trains("classifier.bias")
    assert head.epochs == 2 and not head.trains("fc1.weight") and head.trains("classifier.bias")


def test_fedbabu_counts_the_body_and_weighs_clients_equally() -> None:
    s = session("fedbabu")
    loop, seen = watch(s)
    body = size(s.method.ctx.w0) - size(s.method.ctx.w0, HEAD)
    assert traffic(loop, "up") == traffic(loop, "down") == [body] * 3
    assert same(loop.server["w"], T.mean([u.tree for u in seen[-1]]))


# ---- LG-FedAvg -------------------------------------------------------------------------------------------------------
def test_lgfedavg_with_all_layers_global_is_uniform_fedavg() -> None:
    assert same(play("lg-fedavg", own={"layers": 3}).server["w"], play("fedavg", weighting="uniform").server["w"])


def test_lgfedavg_with_no_layer_global_is_local() -> None:
    lg, local = play("lg-fedavg", own={"layers": 0}), play("local")
    assert all(same(state(lg, i)["own"], state(local, i)["own"]) for i in CLIENTS if state(local, i))
    assert traffic(lg, "up") == traffic(lg, "down") == [0] * 3


def test_lgfedavg_shares_the_head_not_the_first_layer() -> None:
    loop = play("lg-fedavg")
    assert loop.server["w"].keys() == HEAD
    head = size(loop.method.ctx.w0, HEAD)
    assert traffic(loop, "up") == traffic(loop, "down") == [head] * 3


def test_lgfedavg_after_warm_rounds_starts_everybody_from_the_warm_model_once() -> None:
    s = session("lg-fedavg", own={"warm_rounds": 2}, rounds=4, join=1.0)
    method, data = s.method, s.federation.data(0)
    warm, _ = watch(session("fedavg", rounds=2, join=1.0, weighting="uniform"))
    server = {"w": warm.server["w"], "answered": []}
    first, _ = method.begin(method.init_client(data), method.down(server, [0], 3).to(0), data, 3)
    assert same(first, warm.server["w"])
    loop, _ = watch(s)
    whole, head = size(method.ctx.w0), size(method.ctx.w0, HEAD)
    assert traffic(loop, "up") == [whole, whole, head, head]
    assert traffic(loop, "down") == [whole, whole, whole, head]
    assert same(T.drop(loop.server["w"], HEAD.__contains__), T.drop(warm.server["w"], HEAD.__contains__))
    body = T.keep(state(loop, 0)["own"], lambda k: k == "fc1.weight")
    assert not same(body, T.keep(warm.server["w"], lambda k: k == "fc1.weight"))
    assert method.global_model(loop.server) is None and method.global_model(server) is not None


# ---- FedALA ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own", [{"layers": 3, "eta": 0}, {"layers": 0}])
def test_fedala_with_weights_of_one_or_none_is_fedavg(own: dict[str, Any]) -> None:
    assert same(play("fedala", own=own).server["w"], play("fedavg").server["w"])


def test_fedala_with_weights_of_zero_on_all_layers_is_local() -> None:
    ala = play("fedala", own={"layers": 3, "eta": 0, "start": 0}, join=1.0)
    local = play("local", join=1.0)
    assert all(same(state(ala, i)["o"], state(local, i)["own"]) for i in CLIENTS)


def test_fedala_weights_move_and_stay_between_zero_and_one() -> None:
    loop = play("fedala", own={"layers": 3}, join=1.0)
    flat = torch.cat([T.flatten(state(loop, i)["A"]) for i in CLIENTS])
    assert float(flat.min()) >= 0 and float(flat.max()) <= 1 and float(flat.std()) > 0


def test_fedala_takes_lower_layers_as_received_and_skips_the_first_round() -> None:
    s = session("fedala")
    method, data = s.method, s.federation.data(0)
    w = jittered(method.ctx.w0, 1)
    first, extras = method.begin(method.init_client(data), w, data, 1)
    assert same(first, w) and not extras
    kept, _ = method.end(method.init_client(data), jittered(w, 2), extras, data, 1)
    assert not kept["settled"]
    second, extras = method.begin(kept, w, data, 2)
    assert all(torch.equal(second[k], w[k]) for k in w if k not in HEAD)
    assert any(not torch.equal(second[k], w[k]) for k in HEAD)
    assert method.end(kept, second, extras, data, 2)[0]["settled"]


def test_fedala_step_is_the_papers_and_the_loop_has_a_cap() -> None:
    s = session("fedala", own={"threshold": 0.0, "max_epochs": 3, "share": 1.0, "eta": 0.5}, batch=1000)
    method, data = s.method, s.federation.data(0)
    assert isinstance(method, FedALA)
    old, new = method.ctx.w0, jittered(method.ctx.w0, 1, 1.0)
    A = {k: torch.full_like(old[k], 0.5) for k in HEAD}
    theta = merged(old, new, A)
    leaves = [theta[k].requires_grad_() for k in sorted(HEAD)]
    loss = method.ctx.ce(theta, Batch(data.train.x, data.train.y))
    slopes = dict(zip(sorted(HEAD), torch.autograd.grad(loss, leaves), strict=True))
    once = method.learned(A, old, new, data, 2, 1)
    for k in HEAD:
        assert torch.allclose(once[k], (A[k] - 0.5 * slopes[k] * (new[k] - old[k])).clamp(0, 1), atol=1e-6)
    thrice = method.learned(method.learned(once, old, new, data, 2, 1), old, new, data, 2, 1)
    for settled, expected in ((False, thrice), (True, once)):
        _, extras = method.begin({"o": old, "A": A, "settled": settled}, new, data, 2)
        assert near(extras["A"], expected)
    assert not near(once, thrice)


def test_fedala_stops_when_losses_have_settled() -> None:
    s = session("fedala", own={"threshold": 1e9, "window": 2, "share": 1.0}, batch=1000)
    method, data = s.method, s.federation.data(0)
    assert isinstance(method, FedALA)
    old, new = method.ctx.w0, jittered(method.ctx.w0, 1, 1.0)
    A = {k: torch.full_like(old[k], 0.5) for k in HEAD}
    assert same(method.learned(A, old, new, data, 2, 50), method.learned(A, old, new, data, 2, 3))


def test_fedala_scores_its_own_last_model() -> None:
    loop = play("fedala", join=1.0)
    data = session("fedala").federation.data(0)
    assert same(loop.method.personal(state(loop, 0), loop.server["w"], data)[0], state(loop, 0)["o"])
    assert not same(state(loop, 0)["o"], loop.server["w"])
    assert traffic(loop, "up") == traffic(loop, "down") == [size(loop.method.ctx.w0)] * 3
