"""Tests of CFL."""

import pytest
import torch

from coterie.core import tree as T
from coterie.methods.cfl import CFL
from coterie.methods.fedavg import FedAvg
from coterie.testing import CHECKS, check
from support.toy import NORMS, W, begin, bind, events, mlp, near, open_toy, planted, play, same, uploads, with_clients

SPLIT = {"eps1": 1e9, "eps2": 0.0, "first_round": 0}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "own", [{"eps1": 0.0, "eps2": 0.0, "first_round": 0}, {**SPLIT, "eps2": 1e9}, {**SPLIT, "first_round": 99}]
)
def test_cfl_that_never_splits_is_uniform_fedavg(own, norm, tmp_path):  # fmt: skip
    a = play(CFL, tmp_path, own, model=mlp(norm), join=0.6)
    b = play(FedAvg, tmp_path, model=mlp(norm), join=0.6, weighting="uniform")
    assert len(a.server["models"]) == 1
    assert near(a.server["models"][0], b.server["w"])  # w + mean of updates and the mean of models differ by rounding


def test_cfl_separates_two_planted_groups_in_one_split(tmp_path):
    loop = play(CFL, tmp_path, {**SPLIT, "first_round": 1}, data=planted(), rounds=2, lr=0.5, batch=20)
    of = loop.server["cluster"]
    assert [of[i] for i in range(6)] == [0, 1, 0, 1, 0, 1]


def direction(k: int, length: float = 1.0) -> torch.Tensor:
    v = torch.zeros(W)
    v[k] = length
    return v


def test_cfl_nested_split_keeps_ids():
    """The first split separates one of three groups, the second the other two; ids are neither sorted nor adjacent."""
    ids = [50, 4, 33, 8, 21, 17, 9, 60, 2]
    group = dict(zip(ids, [0, 1, 2, 0, 1, 2, 0, 1, 2], strict=True))
    base = torch.stack([direction(0), -direction(0) + direction(1), -direction(0) - direction(1)])
    method = with_clients(bind(CFL, {**SPLIT, "min_cluster": 2}), ids)
    server = method.setup()
    for t in (1, 2):
        steps = torch.stack([base[group[i]] * (1 + 0.01 * n) for n, i in enumerate(ids)])
        trees = [T.unflatten(s, method.ctx.w0) for s in steps]
        server = method.aggregate(server, uploads(trees, ids), t)
    of = server["cluster"]
    assert set(of) == set(ids)
    found = {c: {i for i in ids if of[i] == c} for c in set(of.values())}
    planted_ = [{i for i in ids if group[i] == g} for g in range(3)]
    # the group that was separated first may be split further, but no cluster mixes two groups
    assert all(any(members <= p for p in planted_) for members in found.values())
    assert {frozenset(m) for m in found.values()} >= {frozenset(planted_[1]), frozenset(planted_[2])}


def test_cfl_each_half_moves_by_its_own_mean_from_the_common_model():
    method = bind(CFL, SPLIT)
    a, b = direction(0), -direction(0)
    trees = [T.unflatten(s, method.ctx.w0) for s in (a, b, 3 * a, 2 * b)]
    after = method.aggregate(method.setup(), uploads(trees), 1)
    w0 = T.flatten(method.ctx.w0)
    assert after["cluster"] == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}
    assert torch.allclose(T.flatten(after["models"][0]), w0 + 2 * a)
    assert torch.allclose(T.flatten(after["models"][1]), w0 + 1.5 * b)


def test_cfl_absent_members_follow_their_last_update_and_others_stay():
    method = with_clients(bind(CFL, SPLIT), [1, 2, 3, 4, 5, 6, 7])
    calm = with_clients(bind(CFL, {**SPLIT, "first_round": 9}), [1, 2, 3, 4, 5, 6, 7])

    def up(steps):
        return uploads([T.unflatten(s, method.ctx.w0) for s in steps.values()], list(steps))

    a, b = direction(0), -direction(0)
    server = calm.aggregate(calm.setup(), up({5: a + 0.3 * direction(2), 6: b + 0.3 * direction(2)}), 1)
    assert set(server["cluster"].values()) == {0}
    server = method.aggregate(server, up({1: a, 2: b, 3: a, 4: b}), 2)
    assert server["cluster"] == {
        1: 0,
        2: 1,
        3: 0,
        4: 1,
        5: 0,
        6: 1,
        7: 0,
    }  # 7 never answered: it stays in the first cluster


def test_cfl_keeps_a_cluster_without_answers_and_does_not_split_small_ones():
    method = with_clients(bind(CFL, {**SPLIT, "min_cluster": 2}), [0, 1, 2])
    two = {k: v + 1 for k, v in method.ctx.w0.items()}
    server = {"models": [T.clone(method.ctx.w0), two], "cluster": {0: 0, 1: 0, 2: 1}, "last": {}}
    steps = [T.unflatten(s, two) for s in (direction(0), -direction(0))]
    after = method.aggregate(server, uploads(steps, [0, 1]), 5)
    assert len(after["models"]) == 2 and same(after["models"][1], two)


def test_cfl_relabelling_the_clients_permutes_the_clusters_only():
    trees = [direction(0), -direction(0), direction(0) * 2, -direction(0) + 0.1 * direction(1), direction(0)]
    ids = [0, 1, 2, 3, 4]
    results = []
    for order in (ids, [3, 0, 4, 1, 2]):
        method = bind(CFL, SPLIT)
        up = uploads([T.unflatten(trees[j], method.ctx.w0) for j in order], ids)
        of = method.aggregate(method.setup(), up, 1)["cluster"]
        results.append({frozenset(order[i] for i in ids if of[i] == c) for c in (0, 1)})
    assert results[0] == results[1] == {frozenset({0, 2, 4}), frozenset({1, 3})}


def test_cfl_clusters_always_partition_the_clients(tmp_path):
    loop = begin(open_toy(CFL, tmp_path, {**SPLIT, "min_cluster": 1}, data=planted(3), join=0.6))
    for _ in range(1, 6):
        loop.step()
        of = loop.server["cluster"]
        assert set(of) == set(range(9)) and set(of.values()) <= set(range(len(loop.server["models"])))
        assert sum(events(loop)[-1]["facts"]["clusters"]) == 9


@pytest.mark.parametrize(
    "name", [n for n in CHECKS if n not in ("learns_a_small_task", "permuting_ids_permutes_results")]
)
def test_cfl_passes_the_battery_with_splits_too(name):  # fmt: skip
    check(CFL, name, **SPLIT)
