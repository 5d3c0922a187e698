"""Tests of FedGroup."""

import pytest
import torch
import torch.nn.functional as F

from coterie.core import tree as T
from coterie.core.method import Trained, Upload
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedgroup import FedGroup
from support.toy import NORMS, W, begin, bind, clients, events, mlp, moved, open_toy, play, same, uploads


@pytest.mark.parametrize("norm", NORMS)
def test_fedgroup_with_one_group_is_fedavg_from_the_cold_start_mean(norm, tmp_path):
    a = begin(open_toy(FedGroup, tmp_path, {"groups": 1, "pretrain_steps": 5}, model=mlp(norm), join=0.6))
    a.step()
    start = mlp(norm)
    missing = start.load_state_dict(a.server["models"][0], strict=False)
    assert not missing.unexpected_keys
    b = begin(open_toy(FedAvg, tmp_path, model=start, join=0.6))
    for _ in (1, 2, 3):
        a.step()
        b.step()
        assert same(a.server["models"][0], b.server["w"])
    assert events(a)[0]["participants"] == [0, 1, 2, 3, 4]


def test_fedgroup_cold_start_is_the_uniform_mean_after_the_given_steps(tmp_path):
    loop = begin(open_toy(FedGroup, tmp_path, {"groups": 1, "pretrain_steps": 1}, batch=100))
    loop.step()
    w0, ctx = loop.method.ctx.w0, loop.method.ctx
    trees = []
    for x, y in clients().parts:
        leaves = {k: v.clone().requires_grad_() for k, v in w0.items()}
        F.cross_entropy(ctx.forward(leaves, x), y).backward()
        trees.append({k: (v - 0.1 * v.grad).detach() for k, v in leaves.items()})
    mean = T.mean(trees)
    assert all(torch.allclose(v, mean[k], atol=1e-6) for k, v in loop.server["models"][0].items())
    assert events(loop)[0]["steps"] == 5


def test_fedgroup_recovers_planted_orthogonal_directions_and_newcomers_follow_theirs():
    method = bind(FedGroup, {"groups": 3})
    rng = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(W, 3, generator=rng)).Q.T  # [3, P], orthonormal
    group = [0, 1, 2, 2, 1, 0, 1]
    ids = [10, 3, 7, 21, 4, 5, 6]
    D = torch.stack([axes[g] * (1 + 0.3 * j) + 0.02 * torch.randn(W, generator=rng) for j, g in enumerate(group)])
    up = uploads(moved(method, D), ids)
    server = method.aggregate(method.setup(), up, 0)
    found = [server["cluster"][i] for i in ids]
    assert set(server["cluster"]) == set(ids) and len(set(found)) == 3
    assert all((found[a] == found[b]) == (group[a] == group[b]) for a in range(7) for b in range(7))
    for g in range(3):
        rows = [j for j, f in enumerate(found) if f == g]
        assert torch.allclose(T.flatten(server["models"][g]), T.flatten(method.ctx.w0) + D[rows].mean(0), atol=1e-5)
        newcomer = uploads(moved(method, 0.5 * server["directions"][g][None]), [99])
        after = method.aggregate(server, newcomer, 1)
        assert after["cluster"][99] == g  # by direction, not by length
        assert same(after["models"][g], server["models"][g])  # it trained from w_0 and does not vote
        assert {i: c for i, c in after["cluster"].items() if i != 99} == server["cluster"]


def test_fedgroup_pre_trains_from_the_first_model_not_from_the_present_one():
    data = clients()
    method = bind(FedGroup, data=data)
    other = {k: v + 1 for k, v in method.ctx.w0.items()}
    assert same(method.begin({}, other, data.data(0), 7).model[0], method.ctx.w0)
    state, _ = method.end({}, Trained(other), data.data(0), 7)
    assert same(method.begin(state, other, data.data(0), 8).model[0], other)


def test_fedgroup_members_are_averaged_by_samples_and_other_groups_stand():
    method = bind(FedGroup, {"groups": 2})
    a, b, c = moved(method, torch.tensor([[1.0] * W, [3.0] * W, [9.0] * W]))
    server = {"models": [c, T.clone(method.ctx.w0)], "cluster": {0: 0, 1: 0, 2: 1}, "directions": torch.ones(2, W)}
    after = method.aggregate(server, [Upload(a, {}, 0, 10), Upload(b, {}, 1, 30)], 3)
    expected = T.add(method.ctx.w0, {k: torch.full_like(v, 2.5) for k, v in a.items()})
    assert torch.allclose(T.flatten(after["models"][0]), T.flatten(expected), atol=1e-5)
    assert same(after["models"][1], server["models"][1]) and after["cluster"] == server["cluster"]


def test_fedgroup_inter_group_step_is_the_normalised_sum():
    method = bind(FedGroup, {"groups": 2, "eta_g": 0.5})
    a, b = ({k: torch.full_like(v, c) for k, v in method.ctx.w0.items()} for c in (1.0, 2.0))
    server = {"models": [a, b], "cluster": {0: 0, 1: 1}, "directions": torch.ones(2, W)}
    after = method.aggregate(server, [Upload(a, {}, 0, 1), Upload(b, {}, 1, 1)], 1)["models"]
    norm_a, norm_b = W**0.5, 2 * W**0.5
    for model, own, other, norm in ((after[0], 1.0, 2.0, norm_b), (after[1], 2.0, 1.0, norm_a)):
        p = 0.5 / norm
        assert torch.allclose(T.flatten(model), torch.full((W,), (own + p * other) / (1 + p)))


def test_fedgroup_counts_one_model_each_way_for_the_cold_start(tmp_path):
    loop = play(FedGroup, tmp_path, {"groups": 2}, join=0.6)
    first, *later = events(loop)
    assert first["bytes"]["device-cloud"] == {"down": {"model": 5 * W * 4}, "up": {"model": 5 * W * 4}}
    assert all(e["bytes"]["device-cloud"]["up"]["model"] == 3 * W * 4 for e in later)
    assert set(loop.server["cluster"]) == set(range(5))
