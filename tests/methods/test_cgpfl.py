"""Tests of CGPFL."""

import pytest
import torch

from coterie.core.method import Upload
from coterie.methods.cgpfl import CGPFL
from coterie.methods.pfedme import PFedMe
from support.toy import NORMS, Toy, begin, bind, events, mlp, models, near, open_toy, play, same


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("join", [1.0, 0.6])
def test_cgpfl_with_one_context_is_pfedme_to_the_bit(join, norm, tmp_path):
    own = {"lam": 5.0, "steps": 4, "inner_steps": 3, "personal_lr": 0.07}
    a = play(CGPFL, tmp_path, {**own, "groups": 1}, model=mlp(norm), join=join)
    b = play(PFedMe, tmp_path, own, model=mlp(norm), join=join, weighting="uniform")
    assert same(a.server["contexts"][0], b.server["w"])
    assert same(models(a), models(b))
    assert all((a.runtime.states.get(i) is None) == (b.runtime.states.get(i) is None) for i in range(5))


def test_cgpfl_clusters_partition_the_clients_it_has_met(tmp_path):
    loop = begin(open_toy(CGPFL, tmp_path, {"groups": 3, "steps": 3}, join=0.4))
    met: set[int] = set()
    for _ in range(1, 6):
        loop.step()
        met |= set(events(loop)[-1]["participants"])
        assert set(loop.server["cluster"]) == met == set(loop.server["bank"]["ids"])
        assert set(loop.server["cluster"].values()) <= {0, 1, 2}


def test_cgpfl_an_empty_context_keeps_its_model_and_labels_stay_aligned():
    method = bind(CGPFL, {"groups": 3, "beta": 1.0})
    w = method.ctx.w0
    steps = [0.0, 1.0, 5.0]
    contexts = [{k: v + s for k, v in w.items()} for s in steps]
    server = {**method.setup(), "contexts": contexts, "grouped": True}
    trees = [{k: v + s for k, v in w.items()} for s in (5.1, 0.1, 4.9)]
    after = method.aggregate(server, [Upload(t, {}, i, 1) for i, t in zip((7, 3, 9), trees, strict=True)], 2)
    assert after["cluster"] == {7: 2, 3: 0, 9: 2}
    assert same(after["contexts"][1], contexts[1])
    assert near(after["contexts"][2], {k: v + 5.0 for k, v in w.items()})
    assert near(after["contexts"][0], {k: v + 0.1 for k, v in w.items()})


def test_cgpfl_absent_clients_are_regrouped_but_do_not_vote():
    method = bind(CGPFL, {"groups": 2})
    w = method.ctx.w0
    server = method.setup()
    first = [Upload({k: v + s for k, v in w.items()}, {}, i, 1) for i, s in ((0, 0.0), (1, 0.2), (2, 3.0))]
    server = method.aggregate(server, first, 1)
    assert server["cluster"] == {0: 0, 1: 0, 2: 1}
    server = method.aggregate(server, [Upload({k: v + 0.4 for k, v in w.items()}, {}, 1, 1)], 2)
    assert server["cluster"] == {0: 0, 1: 0, 2: 1}
    assert near(server["contexts"][0], {k: v + 0.4 for k, v in w.items()})
    assert near(server["contexts"][1], {k: v + 3.0 for k, v in w.items()})


def test_cgpfl_separates_planted_groups(tmp_path):
    rng = torch.Generator().manual_seed(5)
    parts = []
    for i in range(6):
        x = torch.randn(20, 4, generator=rng)
        parts.append((x, (x[:, :3].argmax(1) + i % 2) % 3))
    loop = play(CGPFL, tmp_path, {"groups": 2}, data=Toy(parts, 3), rounds=3, batch=20)
    assert [loop.server["cluster"][i] for i in range(6)] == [0, 1, 0, 1, 0, 1]
