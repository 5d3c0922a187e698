"""FedAMP and CFL held to their papers."""

import math

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Batch, replace
from coterie.errors import CoterieError
from coterie.methods.cfl import CFL
from coterie.methods.fedamp import FedAMP
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedprox import FedProx
from coterie.methods.local import Local
from coterie.parts import model_bank as bank
from coterie.testing import CHECKS, check
from support.toy import (
    W,
    begin,
    bind,
    clients,
    events,
    mlp,
    models,
    moved,
    near,
    open_toy,
    planted,
    play,
    same,
    uploads,
)

NORMS = [False, True]
RUNS = [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 0.01}]


def among(method, ids):
    """The same method in a federation of these clients: ids are not positions."""
    method.ctx = replace(method.ctx, clients=tuple(ids))
    return method


# ---- FedAMP ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("run", RUNS)
def test_fedamp_without_a_pull_is_local(run, norm, tmp_path):
    a = play(FedAMP, tmp_path, {"lam": 0.0}, model=mlp(norm), join=0.6, **run)
    b = play(Local, tmp_path, model=mlp(norm), join=0.6, **run)
    assert same(models(a), models(b))


@pytest.mark.parametrize("variant", ["heuristic", "attention"])
def test_fedamp_alone_is_fedprox_to_its_own_start(variant, tmp_path):
    data = clients(1)
    a = play(FedAMP, tmp_path, {"variant": variant, "lam": 3.0, "alpha": 2.0}, data=data)
    b = play(FedProx, tmp_path, {"mu": 1.5}, data=data)
    assert near(models(a)[0], b.server["w"])


def test_fedamp_heuristic_mixing_by_hand():
    method = bind(FedAMP, {"sigma": 2.0, "self_weight": 0.3})
    V = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 2.0]])
    X = method.mixing(V, torch.tensor([0, 2]))
    a, b = math.exp(2.0 * 0.0), math.exp(2.0 * math.sqrt(0.5))
    assert torch.allclose(X[0], torch.tensor([0.3, 0.7 * a / (a + b), 0.7 * b / (a + b)]))
    assert torch.allclose(X[1], torch.tensor([0.35, 0.35, 0.3]))


def test_fedamp_attention_mixing_by_hand():
    method = bind(FedAMP, {"variant": "attention", "alpha": 0.5, "sigma": 4.0})
    V = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0]])
    near_, far = 0.5 / 4 * math.exp(-1.0), 0.5 / 4 * math.exp(-4.0)
    assert torch.allclose(method.mixing(V, torch.tensor([0]))[0], torch.tensor([1 - near_ - far, near_, far]))


@pytest.mark.parametrize("variant", ["heuristic", "attention"])
def test_fedamp_rows_are_convex_and_identical_clients_mix_to_themselves(variant):
    method = bind(FedAMP, {"variant": variant, "sigma": 5.0})
    rng = torch.Generator().manual_seed(0)
    V = torch.randn(6, 9, generator=rng)
    X = method.mixing(V, torch.arange(6))
    assert torch.allclose(X.sum(1), torch.ones(6)) and (X >= 0).all() and (X <= 1).all()
    same_ = V[:1].expand(6, -1)
    assert torch.allclose(method.mixing(same_, torch.arange(6)) @ same_, same_, atol=1e-6)


def test_fedamp_far_apart_clients_keep_their_own_and_too_close_ones_get_a_sentence():
    method = bind(FedAMP, {"variant": "attention", "sigma": 0.5})
    V = 100 * torch.eye(4)
    assert torch.equal(method.mixing(V, torch.arange(4)), torch.eye(4))
    with pytest.raises(CoterieError, match="alpha / sigma is too large"):
        method.mixing(torch.zeros(4, 3), torch.arange(4))


def test_fedamp_penalty_has_a_gradient():
    method = bind(FedAMP, {"lam": 3.0, "alpha": 2.0})
    batch = Batch(*clients().parts[0])
    leaves = {k: v.clone().requires_grad_() for k, v in method.ctx.w0.items()}
    u = {k: v - 0.2 for k, v in method.ctx.w0.items()}
    whole = torch.autograd.grad(method.loss(leaves, batch, {"u": u}), list(leaves.values()))
    plain = torch.autograd.grad(method.ctx.ce(leaves, batch), list(leaves.values()))
    assert all(
        torch.allclose(a - b, torch.full_like(a, 1.5 * 0.2), atol=1e-5) for a, b in zip(whole, plain, strict=True)
    )


def test_fedamp_mixes_the_stored_models_of_the_absent_by_id():
    ids = (12, 3, 40)
    method = among(bind(FedAMP, {"self_weight": 0.25, "sigma": 1e-9}), ids)  # others weigh the same
    one, two = moved(method, torch.tensor([[1.0] * W, [5.0] * W]))
    server = method.aggregate(method.setup(), uploads([one], [40]), 1)
    server = method.aggregate(server, uploads([two], [3]), 2)
    sent = method.down(server, [40, 12, 99], 3)
    offset = T.flatten(sent.to(40)) - T.flatten(method.ctx.w0)
    assert torch.allclose(offset, torch.full((W,), 0.25 * 1 + 0.375 * 5 + 0.375 * 0), atol=1e-5)
    offset = T.flatten(sent.to(12)) - T.flatten(method.ctx.w0)
    assert torch.allclose(offset, torch.full((W,), 0.375 * 1 + 0.375 * 5), atol=1e-5)
    offset = T.flatten(sent.to(99)) - T.flatten(method.ctx.w0)
    assert torch.allclose(offset, torch.full((W,), (1 + 5 + 0) / 3), atol=1e-5)  # a newcomer gets the mean of all
    assert bank.rows(server["bank"], [40]).tolist() == [2]


# ---- CFL -------------------------------------------------------------------------------------------------------------
SPLIT = {"eps1": 1e9, "eps2": 0.0, "first_round": 0}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "own", [{"eps1": 0.0, "eps2": 0.0, "first_round": 0}, {**SPLIT, "eps2": 1e9}, {**SPLIT, "first_round": 99}]
)
def test_cfl_that_never_splits_is_uniform_fedavg(own, norm, tmp_path):  # fmt: skip
    a = play(CFL, tmp_path, own, model=mlp(norm), join=0.6)
    b = play(FedAvg, tmp_path, model=mlp(norm), join=0.6, weighting="uniform")
    assert len(a.server["models"]) == 1
    assert near(a.server["models"][0], b.server["w"])  # w + mean of updates rounds otherwise than the mean of models


def test_cfl_separates_two_planted_groups_in_one_split(tmp_path):
    loop = play(CFL, tmp_path, {**SPLIT, "first_round": 1}, data=planted(), rounds=2, lr=0.5, batch=20)
    of = loop.server["cluster"]
    assert [of[i] for i in range(6)] == [0, 1, 0, 1, 0, 1]


def direction(k: int, length: float = 1.0) -> torch.Tensor:
    v = torch.zeros(W)
    v[k] = length
    return v


def test_cfl_nested_split_keeps_ids():
    """Three planted groups: first one against two, then the two; ids are neither sorted nor adjacent."""
    ids = [50, 4, 33, 8, 21, 17, 9, 60, 2]
    group = dict(zip(ids, [0, 1, 2, 0, 1, 2, 0, 1, 2], strict=True))
    base = torch.stack([direction(0), -direction(0) + direction(1), -direction(0) - direction(1)])
    method = among(bind(CFL, {**SPLIT, "min_cluster": 2}), ids)
    server = method.setup()
    for t in (1, 2):
        steps = torch.stack([base[group[i]] * (1 + 0.01 * n) for n, i in enumerate(ids)])
        trees = [T.unflatten(s, method.ctx.w0) for s in steps]
        server = method.aggregate(server, uploads(trees, ids), t)
    of = server["cluster"]
    assert set(of) == set(ids)
    found = {c: {i for i in ids if of[i] == c} for c in set(of.values())}
    planted_ = [{i for i in ids if group[i] == g} for g in range(3)]
    # the group that was alone after the first split (all of one mind) may be cut further; nobody crosses a border
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
    method = among(bind(CFL, SPLIT), [1, 2, 3, 4, 5, 6, 7])
    calm = among(bind(CFL, {**SPLIT, "first_round": 9}), [1, 2, 3, 4, 5, 6, 7])

    def up(steps):
        return uploads([T.unflatten(s, method.ctx.w0) for s in steps.values()], list(steps))

    a, b = direction(0), -direction(0)
    server = calm.aggregate(calm.setup(), up({5: a + 0.3 * direction(2), 6: b + 0.3 * direction(2)}), 1)
    assert set(server["cluster"].values()) == {0}
    server = method.aggregate(server, up({1: a, 2: b, 3: a, 4: b}), 2)
    assert server["cluster"] == {1: 0, 2: 1, 3: 0, 4: 1, 5: 0, 6: 1, 7: 0}  # 7 was never heard: it waits in the first


def test_cfl_a_cluster_nobody_answered_for_stands_still_and_small_ones_are_not_split():
    method = among(bind(CFL, {**SPLIT, "min_cluster": 2}), [0, 1, 2])
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
