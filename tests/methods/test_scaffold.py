"""Tests of SCAFFOLD."""

import torch

from coterie.core.method import Batch
from support.short_runs import CLIENTS, STATS, near, plain, play, session, size, state, traffic, watch


def test_scaffold_is_fedavg_in_its_first_round() -> None:
    scaffold, avg = play("scaffold", rounds=1), play("fedavg", rounds=1, weighting="uniform")
    assert near(scaffold.server["w"], avg.server["w"])


def test_scaffold_server_control_is_the_mean_of_all_clients_under_partial_participation_and_failures() -> None:
    loop = play("scaffold", rounds=4, join=0.6, dropout=0.3)
    kept = [state(loop, i)["c"] for i in CLIENTS if state(loop, i) is not None]
    for k, c in loop.server["c"].items():
        assert torch.allclose(c, sum(own[k] for own in kept) / 5, atol=1e-5), k
        assert bool(c.abs().sum() > 0), k


def test_scaffold_control_is_the_mean_gradient_of_the_last_local_training() -> None:
    """After one step on all data, c_i is the gradient at the received model."""
    s = session("scaffold", plain(), rounds=1, batch=1000)
    loop, seen = watch(s)
    w0 = s.method.ctx.w0
    for u in seen[0]:
        data = s.federation.data(u.sender)
        leaves = {k: v.clone().requires_grad_() for k, v in w0.items()}
        gradient = torch.autograd.grad(s.method.ctx.ce(leaves, Batch(*data.train)), list(leaves.values()))
        assert near(state(loop, u.sender)["c"], dict(zip(leaves, gradient, strict=True)), 1e-5)


def test_scaffold_sends_the_trained_entries_twice() -> None:
    loop = play("scaffold")
    ctx = loop.method.ctx
    both = size(ctx.w0) + size(ctx.w0, set(ctx.net.trainable))
    assert traffic(loop, "up") == traffic(loop, "down") == [both] * 3
    assert not STATS & loop.server["c"].keys()
