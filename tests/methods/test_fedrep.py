"""Tests of FedRep."""

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Start
from coterie.methods.fedrep import FedRep
from coterie.train.optimisers import Optimiser
from coterie.train.trainer import train
from support.toy import bind, clients, gradient, mlp, near, play, same

RULES = [Optimiser(), Optimiser("sgd", 0.9, 0.1), Optimiser("adam", 0.0, 0.1), Optimiser("adamw", 0.0, 0.1)]


@pytest.mark.parametrize("rule", RULES)
def test_fedrep_freezes_hold_under_every_optimiser(rule):
    """Frozen entries keep their bits, including the statistics of batch norm."""
    data = clients()
    method = bind(FedRep, {"head_epochs": 2, "body_epochs": 2}, model=mlp(True), data=data)
    ctx, head = method.ctx, method.ctx.group("head")
    for phase, moves in zip(method.phases(1), (head, ctx.group("body")), strict=True):
        after = train(ctx, rule, [phase], Start(ctx.w0), data.data(0), 1)[0].params
        changed = {k for k in after if not torch.equal(after[k], ctx.w0[k])}
        assert changed <= moves and changed & ctx.net.trainable
        assert bool(changed & ctx.group("bn_stats")) == (moves != head)


def test_fedrep_by_hand_head_first_then_body(tmp_path):
    data = clients(1)
    loop = play(FedRep, tmp_path, {"head_epochs": 1, "body_epochs": 1}, data=data, rounds=1, batch=100)
    ctx, (x, y) = loop.method.ctx, data.parts[0]
    head = ctx.group("head")
    g = gradient(ctx, ctx.w0, x, y)
    one = {k: v - 0.1 * g[k] if k in head else v for k, v in ctx.w0.items()}
    g = gradient(ctx, one, x, y)
    two = {k: v if k in head else v - 0.1 * g[k] for k, v in one.items()}
    assert near(loop.runtime.states.get(0)["own"], T.keep(two, head.__contains__))
    assert near(loop.server["w"], T.drop(two, head.__contains__))


def test_fedrep_without_body_epochs_never_moves_the_body(tmp_path):
    loop = play(FedRep, tmp_path, {"body_epochs": 0}, model=mlp(True), data=clients(4, sizes=(8,)), optimizer="adam")
    w0 = loop.method.ctx.w0
    assert same(loop.server["w"], T.keep(w0, loop.server["w"].__contains__))  # the mean of four equal models is exact
    assert not torch.equal(loop.runtime.states.get(0)["own"]["3.weight"], w0["3.weight"])
