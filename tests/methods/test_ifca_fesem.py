"""IFCA and FeSEM, and the bytes of all methods with clusters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.core import tree as T
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedgroup import FedGroup
from coterie.methods.fesem import FeSEM
from coterie.methods.flhc import FLHC
from coterie.methods.ifca import IFCA
from coterie.methods.local import Local
from coterie.parts.initial_models import starts
from support.toy import W, begin, bind, clients, events, mlp, models, moved, open_toy, planted, play, same, uploads

NORMS = [False, True]


# ---- one group is FedAvg ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("join", [1.0, 0.6])
@pytest.mark.parametrize(
    ("cls", "own", "get"),
    [
        (IFCA, {"groups": 1}, lambda s: s["models"][0]),
        (FeSEM, {"groups": 1}, lambda s: s["centres"][0]),
    ],
)
def test_one_group_is_uniform_fedavg_to_the_bit(cls, own, get, join, norm, tmp_path):
    a = play(cls, tmp_path, own, model=mlp(norm), join=join)
    b = play(FedAvg, tmp_path, model=mlp(norm), join=join, weighting="uniform")
    assert same(get(a.server), b.server["w"])
    assert same(models(a), models(b))


# ---- IFCA ------------------------------------------------------------------------------------------------------------
def test_ifca_starts_differ_and_the_first_is_the_runs_own():
    method = bind(IFCA, {"groups": 3}, model=mlp(True))
    w0 = T.clone(method.ctx.w0)
    one, two, three = method.setup()["models"]
    assert same(one, w0) and same(method.ctx.w0, w0)
    weights = [m["0.weight"] for m in (one, two, three)]
    assert not any(torch.equal(weights[i], weights[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert same(method.setup()["models"][1], two)
    bound = 1 / 4**0.5  # of nn.Linear's own draw from 4 inputs
    assert two["0.weight"].abs().max() <= bound and torch.equal(two["1.running_var"], torch.ones(6))
    assert all(v.dtype == torch.float32 and not v.requires_grad for v in two.values())


def test_ifca_refuses_a_model_that_has_only_one_start():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 3))

        def forward(self, x):
            return x @ self.w

    with pytest.raises(CoterieError, match="start equal"):
        bind(IFCA, {"groups": 2}, model=Fixed())
    assert len(starts(bind(IFCA, {"groups": 1}, model=Fixed()).ctx, 1)) == 1


def test_ifca_picks_the_lowest_loss_on_all_training_data():
    data = clients()
    method = bind(IFCA, {"groups": 4}, model=mlp(True), data=data)
    server = method.setup()
    sent = method.down(server, [0], 1).to(0)
    for i, (x, y) in enumerate(data.parts):
        table = [float(F.cross_entropy(method.ctx.forward(m, x), y)) for m in server["models"]]
        best = table.index(min(table))
        params, extras = method.begin({}, sent, data.data(i), 1)
        assert extras["picked"] == best and same(params, server["models"][best])
        assert same(method.personal({}, sent, data.data(i))[0], server["models"][best])


def test_ifca_leaves_a_model_that_nobody_picked():
    method = bind(IFCA, {"groups": 3})
    server = method.setup()
    ones = {k: torch.ones_like(v) for k, v in method.ctx.w0.items()}
    up = uploads([{**ones, "x:picked": torch.tensor(2, dtype=torch.int32)}] * 2)
    after = method.aggregate(server, up, 1)["models"]
    assert same(after[0], server["models"][0]) and same(after[1], server["models"][1]) and same(after[2], ones)


def test_ifca_relabelling_the_models_permutes_the_choices_only(tmp_path):
    order = [2, 0, 1]
    results = []
    for permuted in (False, True):
        loop = begin(open_toy(IFCA, tmp_path, {"groups": 3}))
        if permuted:
            loop.server["models"] = [loop.server["models"][g] for g in order]
        loop.step()
        loop.done = 1
        results.append((loop.server["models"], models(loop)))
    assert all(same(results[1][0][new], results[0][0][old]) for new, old in enumerate(order))
    assert same(results[0][1], results[1][1])


def test_ifca_separates_planted_groups(tmp_path):
    data = planted()
    loop = play(IFCA, tmp_path, {"groups": 2}, data=data, rounds=15, lr=0.5, batch=20)
    models_ = loop.server["models"]
    picks = [loop.method.pick(models_, data.data(i)) for i in range(6)]
    assert picks[0::2] == [picks[0]] * 3 and picks[1::2] == [1 - picks[0]] * 3


# ---- FeSEM -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
def test_fesem_with_a_centre_for_everybody_is_local(norm, tmp_path):
    a = play(FeSEM, tmp_path, {"groups": 5}, model=mlp(norm))
    b = play(Local, tmp_path, model=mlp(norm))
    assert sorted(a.server["cluster"].values()) == list(range(5))
    assert same(models(a), models(b))


def test_fesem_e_step_never_increases_the_sum_of_squared_distances(tmp_path):
    loop = begin(open_toy(FeSEM, tmp_path, {"groups": 3}, data=planted(3), join=0.7, lr=0.5))
    seen = []
    inner = loop.method.aggregate

    def spy(server, up, round):
        after = inner(server, up, round)
        if server["grouped"]:
            flat, centres = ([T.flatten(t) for t in trees] for trees in ([u.tree for u in up], server["centres"]))

            def total(of):
                return sum(float((v - centres[of[u.sender]]).square().sum()) for u, v in zip(up, flat, strict=True))

            known = {u.sender: server["cluster"].get(u.sender, 0) for u in up}
            others = [{**known, u.sender: g} for u in up for g in range(3)]
            seen.append((total(after["cluster"]), min(total(o) for o in [known, *others])))
        return after

    loop.method.aggregate = spy
    for _ in range(1, 6):
        loop.step()
    assert len(seen) == 4 and all(new <= old + 1e-6 for new, old in seen)


def test_fesem_puts_every_answer_into_one_cluster_and_keeps_the_absent(tmp_path):
    loop = begin(open_toy(FeSEM, tmp_path, {"groups": 2}, join=0.6))
    for _ in range(1, 5):
        before = dict(loop.server["cluster"])
        loop.step()
        asked = events(loop)[-1]["participants"]
        assert set(loop.server["cluster"]) == {*before, *asked}
        assert set(loop.server["cluster"].values()) <= {0, 1}
        assert all(loop.server["cluster"][i] == g for i, g in before.items() if i not in asked)


def test_fesem_centre_without_members_stays():
    method = bind(FeSEM, {"groups": 2})
    far = {k: v + 100 for k, v in method.ctx.w0.items()}
    server = {"centres": [T.clone(method.ctx.w0), far], "cluster": {}, "grouped": True}
    after = method.aggregate(server, uploads(moved(method, torch.full((2, W), 0.1))), 1)
    assert after["cluster"] == {0: 0, 1: 0} and same(after["centres"][1], far)
    assert torch.allclose(after["centres"][0]["0.weight"], method.ctx.w0["0.weight"] + 0.1)


def test_fesem_distances_ignore_batch_norm_statistics():
    method = bind(FeSEM, {"groups": 2}, model=mlp(True))
    near_ = {k: v + 0.1 for k, v in method.ctx.w0.items()}
    server = {"centres": [T.clone(method.ctx.w0), near_], "cluster": {}, "grouped": True}
    misleading = {**T.clone(method.ctx.w0), "1.running_mean": near_["1.running_mean"] * 50}
    assert method.expectation(server, uploads([misleading])).tolist() == [0]


def test_fesem_needs_as_many_participants_as_centres():
    with pytest.raises(CoterieError, match="groups = 4 is more than the 2 participants"):
        bind(FeSEM, {"groups": 4}, join=0.4)


# ---- bytes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cls", "own", "up", "down"),
    [
        (IFCA, {"groups": 3}, W + 1, 3 * W),
        (FeSEM, {}, W, W),
        (FedGroup, {}, W, W),
        (FLHC, {"warmup": 1}, W, W),
    ],
)
def test_bytes_by_hand(cls, own, up, down, tmp_path):
    """Scalars times four, for every participant."""
    for e in events(play(cls, tmp_path, own, join=0.6))[1:]:
        m = len(e["participants"])
        assert sum(e["bytes"]["device-cloud"]["up"].values()) == 4 * up * m
        assert sum(e["bytes"]["device-cloud"]["down"].values()) == 4 * down * m
