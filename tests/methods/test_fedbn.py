"""Tests of FedBN."""

import pytest
import torch
from torch import nn

from coterie.errors import CoterieError
from coterie.methods.fedbn import FedBN
from support.short_runs import BN, plain, play, same, session, size, state, traffic, watch


class FedBNAnywhere(FedBN):
    needs = ()


def test_fedbn_without_batch_norm_is_fedavg() -> None:
    bn, avg = play(FedBNAnywhere, plain()), play("fedavg", plain())
    assert same(bn.server["w"], avg.server["w"])


def test_fedbn_refuses_a_model_without_batch_norm() -> None:
    with pytest.raises(CoterieError, match="FedBN needs a model with batch norm"):
        session("fedbn", plain())


def test_fedbn_clients_differ_in_batch_norm_only() -> None:
    s = session("fedbn", join=1.0)
    loop, seen = watch(s)
    trees = [s.method.personal(state(loop, i), loop.server["w"], s.federation.data(i))[0] for i in (0, 1)]
    assert {k for k in trees[0] if not torch.equal(trees[0][k], trees[1][k])} == BN
    assert not any(BN & u.tree.keys() for round in seen for u in round)
    assert traffic(loop, "up") == traffic(loop, "down") == [size(s.method.ctx.w0) - size(s.method.ctx.w0, BN)] * 3


def test_fedbn_newcomer_starts_from_the_initial_batch_norm_and_is_scored_with_its_own_statistics() -> None:
    s = session("fedbn")
    loop, _ = watch(s)
    data = s.federation.data(4)
    fresh = s.method.init_client(data)
    begun, _ = s.method.begin(fresh, loop.server["w"], data, 4).model
    scored, _ = s.method.personal(fresh, loop.server["w"], data)
    assert all(torch.equal(begun[k], s.method.ctx.w0[k]) for k in BN)
    entering = nn.functional.linear(data.train.x.flatten(1), begun["fc1.weight"], begun["fc1.bias"])
    assert torch.allclose(scored["bn1.running_mean"], entering.mean(0), atol=1e-5)
    assert torch.allclose(scored["bn1.running_var"], entering.var(0, correction=0), atol=1e-5)
