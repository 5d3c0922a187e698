"""Tests of FedFomo."""

from typing import Any

import pytest
import torch
from torch import nn

from coterie.core import tree as T
from coterie.core.method import Upload
from coterie.methods.fedfomo import FedFomo
from support.short_runs import (
    CLIENTS,
    bound,
    near,
    play,
    same,
    session,
    size,
    state,
    traffic,
    upload,
    upload_tree,
    watch,
)


def test_fedfomo_without_models_of_others_is_local() -> None:
    fomo, local = play("fedfomo", own={"models": 0}), play("local")
    assert all(same(state(fomo, i)["w"], state(local, i)["own"]) for i in CLIENTS if state(local, i))


def fomo_client() -> tuple[FedFomo, Any, T.Tree, T.Tree]:
    """Return a method, a client's data, an initial model and one with a lower validation loss."""
    s = session("fedfomo", join=1.0, rounds=2)
    loop, _ = watch(s)
    assert isinstance(s.method, FedFomo)
    return s.method, s.federation.data(0), s.method.ctx.w0, state(loop, 0)["w"]


def test_fedfomo_keeps_its_model_when_no_candidate_helps() -> None:
    method, data, start, better = fomo_client()
    begun, extras = method.begin({"w": start, "old": better}, {"models": T.flatten(start)[None]}, data, 3).model
    assert same(begun, start) and float(extras["affinity"][0]) < 0


def test_fedfomo_candidate_equal_to_the_old_model_weighs_nothing() -> None:
    method, data, start, better = fomo_client()
    sent = torch.stack([T.flatten(start), T.flatten(better)])
    begun, extras = method.begin({"w": start, "old": start}, {"models": sent}, data, 3).model
    assert float(extras["affinity"][0]) == 0 and float(extras["affinity"][1]) > 0
    assert same(begun, better)


def test_fedfomo_baseline_is_the_model_before_the_last_training_so_own_training_counts() -> None:
    method, data, start, better = fomo_client()
    begun, _ = method.begin({"w": better, "old": start}, {"models": T.flatten(better)[None]}, data, 3).model
    assert near(begun, better)
    half = {k: (v + start[k]) / 2 for k, v in better.items()}
    raw = method.affinities([half, better], start, data).clamp(min=0)
    mixed, _ = method.begin({"w": better, "old": start}, {"models": T.flatten(half)[None]}, data, 3).model
    assert near(mixed, T.mean([half, better], raw)) and bool((raw > 0).all())


def test_fedfomo_gives_a_harmful_candidate_no_weight_next_to_a_helpful_one() -> None:
    method, data, start, better = fomo_client()
    worse = {k: 2 * start[k] - v for k, v in better.items()}  # the same distance in the opposite direction
    begun, extras = method.begin({"w": better, "old": start}, {"models": T.flatten(worse)[None]}, data, 3).model
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
    server = method.aggregate(method.setup(), [upload(method, i, upload_tree(method, i)) for i in CLIENTS], 1)
    t = next(t for t in range(2, 50) if method.sent_to(server, 1, t) != sorted(method.sent_to(server, 1, t)))
    picked = method.sent_to(server, 1, t)
    assert len(picked) == 2 and 1 not in picked
    sent = Upload({**upload_tree(method, 7), "x:affinity": torch.tensor([2.0, -1.0])}, {}, 1, 10)
    after = method.aggregate(server, [sent], t)
    assert float(after["similarity"][1, picked[0]]) == 2 and float(after["similarity"][1, picked[1]]) == -1
    assert method.sent_to(after, 1, 60)[0] == picked[0] and picked[1] not in method.sent_to(after, 1, 60)
    assert torch.equal(after["bank"]["flat"][1], T.flatten(upload_tree(method, 7)))


def test_fedfomo_explores_at_first_and_sends_at_most_all_models() -> None:
    method = bound("fedfomo", own={"models": 1, "explore": 1.0, "explore_decay": 0.5})
    many = bound("fedfomo", own={"models": 50})
    assert isinstance(method, FedFomo) and isinstance(many, FedFomo)
    server = method.aggregate(method.setup(), [upload(method, i, upload_tree(method, i)) for i in CLIENTS], 1)
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
