"""Tests of FedPAC."""

import pytest
import torch

from coterie.methods.fedpac import combination
from support.short_runs import HEAD, play, same, session


def test_fedpac_weighs_equal_clients_by_one_over_variance_and_ignores_distant_ones() -> None:
    same_, variances = torch.ones(3, 2, 4).double(), torch.tensor([1.0, 2.0, 4.0]).double()
    assert combination(0, same_, variances) == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=1e-6)
    apart = 100 * torch.eye(3).double()[:, None]
    for i in range(3):
        assert combination(i, apart, variances) == pytest.approx([float(j == i) for j in range(3)], abs=1e-3)


def test_fedpac_weights_are_better_than_any_others_on_the_simplex() -> None:
    rng = torch.Generator().manual_seed(0)
    vectors, variances = torch.rand(6, 3, 4, generator=rng).double(), torch.rand(6, generator=rng).double()
    gaps = (vectors[2] - vectors).flatten(1)
    P = torch.diag(variances) + gaps @ gaps.T
    a = torch.tensor(combination(2, vectors, variances)).double()
    others = torch.distributions.Dirichlet(torch.full((6,), 0.3).double()).sample((2000,))
    assert a.min() >= 0 and float(a.sum()) == pytest.approx(1, abs=0.01)
    assert float(a @ P @ a / a.sum() ** 2) <= float(((others @ P) * others).sum(1).min()) + 1e-6


def test_fedpac_hands_every_participant_a_head_of_its_own_and_others_the_first() -> None:
    loop = play("fedpac", rounds=1)
    heads, first = loop.server["heads"], loop.method.ctx.w0
    assert len(heads) == 3 and all(set(h) == HEAD for h in heads.values())
    sent = loop.method.down(loop.server, list(range(5)), 2)
    for i in range(5):
        personal, _ = loop.method.personal({}, sent.to(i), session("fedpac").federation.data(i))
        assert same({k: personal[k] for k in HEAD}, heads.get(i, {k: first[k] for k in HEAD}))
    assert not same(*list(heads.values())[:2])
