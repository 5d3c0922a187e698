"""Tests of FedSoft."""

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Batch, Upload
from coterie.methods.fedsoft import IMPORTANCE, TRAINS
from support.short_runs import CLIENTS, jittered, play, same, session, size, state, traffic, watch


def test_one_cluster_and_no_pull_is_training_alone() -> None:
    """Clients start from their own models, so nothing that the server sends has an effect."""
    soft = play("fedsoft", own={"groups": 1, "lam": 0}, join=1.0)
    alone = play("local", join=1.0)
    assert all(same(state(soft, i)["model"], state(alone, i)["own"]) for i in CLIENTS)


def test_importance_is_the_share_of_samples_for_which_a_model_is_best() -> None:
    s = session("fedsoft", own={"groups": 3, "smoother": 0.01})
    method, data = s.method, s.federation.data(0)
    models = [jittered(method.ctx.w0, k, 0.3) for k in (1, 2)]
    table = torch.stack(
        [
            torch.nn.functional.cross_entropy(method.ctx.forward(m, data.train.x), data.train.y, reduction="none")
            for m in models
        ]
    )
    first = float((table[0] <= table[1]).float().mean())
    u = method.importance([*models, models[1]], data)  # of two equal models the first one counts
    assert u.tolist() == pytest.approx([first or 0.01, (1 - first) or 0.01, 0.01])


def test_the_pull_is_towards_every_cluster_by_importance() -> None:
    s = session("fedsoft", own={"lam": 0.7})
    method, data = s.method, s.federation.data(0)
    sent = method.down(method.setup(), [0], 1).to(0)
    start = method.begin({"u": torch.tensor([0.8, 0.3])}, sent, data, 1)
    batch, names = Batch(data.train.x[:5], data.train.y[:5]), method.ctx.net.trainable
    losses = []
    for w in (jittered(method.ctx.w0, 1), jittered(method.ctx.w0, 2)):
        far = [float(T.sqdist(w, T.tagged(str(g), sent), names)) for g in (0, 1)]
        pull = 0.35 * (0.8 * far[0] + 0.3 * far[1])
        losses.append(float(method.loss(w, batch, start.extras)) - float(method.ctx.loss(w, batch)) - pull)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # equal up to a constant, which has no gradient


def test_draws_follow_importance_and_samples() -> None:
    method = session("fedsoft", join=0.4).method
    rare, sure = torch.tensor([1e-9, 50.0]).double(), torch.tensor([50.0, 1e-9]).double()
    server = {**method.setup(), "importance": {0: sure, 1: rare, 2: rare, 3: rare, 4: rare}}
    for t in (1, 3, 5):
        first, second = method.drawn(server, t)
        assert first == [0] and second != [0] and len(second) == 1
    assert method.drawn({**method.setup(), "importance": {}}, 1) == method.drawn(method.setup(), 1)


def test_a_cluster_is_the_mean_of_its_draw_or_of_all_by_importance() -> None:
    for join, weights in ((0.4, None), (1.0, [3.0, 1.0])):
        method = session("fedsoft", join=join).method
        server = {
            **method.setup(),
            "importance": {i: torch.tensor([3.0 - 2 * (i == 1), 1.0]).double() for i in CLIENTS},
        }
        ids = method.drawn(server, 1)[0] if join < 1 else [0, 1]
        trees = {i: T.drop(jittered(method.ctx.w0, i), method.stays) for i in ids}
        new = method.aggregate(server, [Upload(t, {}, i, 10) for i, t in trees.items()], 1)
        assert same(new["models"][0], T.mean([trees[i] for i in ids], weights))


def test_who_is_not_drawn_sends_its_importance_only_and_keeps_its_model() -> None:
    loop, seen = watch(session("fedsoft", own={"interval": 1}, join=0.4))
    assert {u.sender for u in seen[0]} == set(CLIENTS) and all(set(u.tree) == {IMPORTANCE} for u in seen[0])
    for t, uploads in enumerate(seen[1:], 1):
        assert len(uploads) == 5
        assert 1 <= sum(len(u.tree) > 1 for u in uploads) <= 2, t
    never = set(CLIENTS) - {u.sender for round in seen for u in round if len(u.tree) > 1}
    assert all("model" not in state(loop, i) for i in never)


def test_clients_receive_all_models_and_in_an_estimate_whether_they_train() -> None:
    loop = play("fedsoft", own={"interval": 2}, rounds=2)
    whole = size(T.tag("0", loop.server["models"][0]))
    assert traffic(loop, "down") == [2 * whole, 2 * whole, 2 * whole + 4]
    sent = loop.method.down(loop.server, [0], 4).to(0)
    assert int(sent[TRAINS]) in (0, 1) and TRAINS not in loop.method.deliver(loop.server, [0], 4).to(0)
