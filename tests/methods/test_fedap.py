"""Tests of FedAP."""

from typing import Any

import torch
from torch import nn

from coterie.core import tree as T
from coterie.methods.fedap import FedAP
from coterie.parts import model_bank as bank
from support.short_runs import (
    BN,
    CLIENTS,
    bound,
    jittered,
    near,
    play,
    same,
    session,
    size,
    state,
    traffic,
    upload_tree,
    watch,
)


def fedap(**own: Any) -> tuple[FedAP, dict[str, Any]]:
    """Return a method and its server after the exchange, when every client has sent a model."""
    method = bound("fedap", own=own)
    assert isinstance(method, FedAP)
    stats = {i: jittered({"s": torch.zeros(2, 24)}, i, 1.0)["s"] for i in CLIENTS}
    stored = bank.fill(T.drop(method.ctx.w0, method.stays), CLIENTS)
    return method, {"bank": bank.put(stored, {i: upload_tree(method, i) for i in CLIENTS}), "stats": stats}


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
    rows = {i: server["stats"][min(i, 1)] * 1000 for i in CLIENTS}  # four equal clients, far from the first
    assert torch.allclose(method.mixing({**server, "stats": rows})[1, 2:], torch.full((3,), 0.5 / 3).double())


def test_fedap_does_not_mix_a_client_that_sent_no_statistics() -> None:
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


def test_fedap_statistics_are_means_and_deviations_of_the_inputs_of_batch_norm() -> None:
    s = session("fedap", own={"warm": 0.0})
    data = s.federation.data(1)
    params, extras = s.method.begin(s.method.init_client(data), T.drop(s.method.ctx.w0, BN.__contains__), data, 0).model
    entering = nn.functional.linear(data.train.x.flatten(1), params["fc1.weight"], params["fc1.bias"])
    expected = torch.stack([entering.mean(0), entering.std(0, correction=0)])
    assert torch.allclose(extras["stats"], expected, atol=1e-5)
