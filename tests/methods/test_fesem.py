"""Tests of FeSEM."""

import pytest
import torch

from coterie.core import tree as T
from coterie.errors import CoterieError
from coterie.methods.fesem import FeSEM
from coterie.methods.local import Local
from support.toy import NORMS, W, begin, bind, events, mlp, models, moved, open_toy, planted, play, same, uploads


@pytest.mark.parametrize("norm", NORMS)
def test_fesem_with_a_centre_for_each_client_is_local(norm, tmp_path):
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
