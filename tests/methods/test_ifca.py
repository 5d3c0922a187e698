"""Tests of IFCA."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.core import tree as T
from coterie.errors import CoterieError
from coterie.methods.ifca import IFCA
from coterie.parts.initial_models import starts
from support.toy import begin, bind, clients, mlp, models, open_toy, planted, play, same, uploads


def test_ifca_starts_differ_and_the_first_is_the_runs_own():
    method = bind(IFCA, {"groups": 3}, model=mlp(True))
    w0 = T.clone(method.ctx.w0)
    one, two, three = method.setup()["models"]
    assert same(one, w0) and same(method.ctx.w0, w0)
    weights = [m["0.weight"] for m in (one, two, three)]
    assert not any(torch.equal(weights[i], weights[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert same(method.setup()["models"][1], two)
    bound = 1 / 4**0.5  # bound of nn.Linear's initial weights for 4 inputs
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
        params, extras = method.begin({}, sent, data.data(i), 1).model
        assert extras["picked"] == best and same(params, server["models"][best])
        assert same(method.personal({}, sent, data.data(i))[0], server["models"][best])


def test_ifca_keeps_a_model_that_no_client_picked():
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
