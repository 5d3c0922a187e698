"""Tests of FL+HC."""

import pytest
import torch

from coterie.core import tree as T
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.methods.flhc import FLHC
from coterie.methods.local import Local
from coterie.testing import CHECKS, check
from support.toy import (
    NORMS,
    W,
    begin,
    bind,
    clients,
    events,
    mlp,
    models,
    moved,
    open_toy,
    planted,
    play,
    same,
    uploads,
)


@pytest.mark.parametrize("norm", NORMS)
def test_flhc_with_a_huge_threshold_is_fedavg_throughout(norm, tmp_path):
    own = {"warmup": 1, "threshold": 1e9}
    a = play(FLHC, tmp_path, own, model=mlp(norm), rounds=4)
    b = play(FedAvg, tmp_path, model=mlp(norm), rounds=4)
    assert len(a.server["models"]) == 1 and same(a.server["models"][0], b.server["w"])
    assert same(models(a), models(b))


@pytest.mark.parametrize("norm", NORMS)
def test_flhc_with_threshold_zero_is_fedavg_then_local(norm, tmp_path):
    a = play(FLHC, tmp_path, {"warmup": 2, "threshold": 0.0}, model=mlp(norm), rounds=4)
    common = play(FedAvg, tmp_path, model=mlp(norm), rounds=2).server["w"]
    start = mlp(norm)
    start.load_state_dict(common, strict=False)
    b = begin(open_toy(Local, tmp_path, model=start, rounds=4))
    b.done = 2
    for _ in (3, 4):
        b.step()
    assert len(a.server["models"]) == 5
    assert same(models(a), models(b))


def test_flhc_separates_planted_groups_by_updates(tmp_path):
    loop = play(FLHC, tmp_path, {"warmup": 1, "groups": 2}, data=planted(), rounds=3, lr=0.5, join=0.5, epochs=3)
    of = loop.server["cluster"]
    assert [of[i] for i in range(6)] == [0, 1, 0, 1, 0, 1]
    asked = [e["participants"] for e in events(loop)]
    assert asked[1] == list(range(6))  # the clustering round
    assert {of[i] for i in asked[2]} == {0, 1}


def test_flhc_clusters_updates_not_weights():
    method = bind(FLHC, {"warmup": 0, "groups": 2, "metric": "cosine", "linkage": "complete"})
    # by weights instead of updates, long steps would differ most from short ones
    big = {k: v + 50 for k, v in method.ctx.w0.items()}
    u, v = torch.linalg.qr(torch.randn(W, 2, generator=torch.Generator().manual_seed(0))).Q.T
    steps = torch.stack([u, v, 10 * u, 10 * v])
    trees = [T.add(big, T.unflatten(s, big)) for s in steps]
    server = method.aggregate({**method.setup(), "w": big}, uploads(trees, [8, 2, 5, 1]), 1)
    assert server["cluster"] == {8: 0, 2: 1, 5: 0, 1: 1}


def test_flhc_samples_at_least_one_client_of_each_cluster():
    method = bind(FLHC, {"warmup": 0}, data=clients(10), join=0.2)
    of = {i: 0 if i < 8 else i - 7 for i in range(10)}
    server = {**method.setup(), "models": [method.ctx.w0] * 3, "cluster": of}
    for t in range(1, 6):
        picked = method.sample(server, t, method.ctx.rng("sample", t))
        assert [of[i] for i in picked].count(0) == 2 and {8, 9} <= set(picked) and len(picked) == 4


def test_flhc_a_client_that_missed_the_clustering_round_joins_the_nearest_cluster_later():
    method = bind(FLHC, {"warmup": 0, "groups": 2})
    a, b = torch.ones(W), -torch.ones(W)
    first = uploads(moved(method, torch.stack([a, b, a])), [0, 1, 2])
    server = method.aggregate(method.setup(), first, 1)
    assert 3 not in server["cluster"]
    sent = method.down(server, [0, 3], 2)
    assert same(sent.to(3), method.ctx.w0) and not same(sent.to(0), method.ctx.w0)
    assert 3 in method.sample(server, 2, method.ctx.rng("sample", 2))
    after = method.aggregate(server, uploads(moved(method, 0.4 * b[None]), [3]), 2)
    assert after["cluster"] == {0: 0, 1: 1, 2: 0, 3: 1}
    assert same(after["models"][1], server["models"][1])


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"metric": "l1"}, "ward needs metric = l2"),
        ({"threshold": 1.0, "groups": 2}, "not both"),
    ],
)
def test_flhc_refuses_impossible_settings(own, words):
    with pytest.raises(CoterieError, match=words):
        bind(FLHC, own)


@pytest.mark.parametrize("name", [n for n in CHECKS if n != "learns_a_small_task"])
def test_flhc_passes_the_battery_with_clusters_too(name):
    check(FLHC, name, warmup=1)
