"""Tests of pFedFDA."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from coterie.errors import CoterieError
from coterie.methods.pfedfda import Fold, definite, discriminant
from coterie.testing import SmallNet
from support.short_runs import HEAD, session, watch


def test_pfedfda_head_is_linear_discriminant_analysis() -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    z = torch.randn(60, 4, generator=rng).double() + 2 * F.one_hot(y, 4)
    means = torch.stack([z[y == k].mean(0) for k in range(3)])
    covariance = sum(torch.cov(z[y == k].T, correction=0) for k in range(3)) / 3
    weight, bias = discriminant(means, covariance, torch.full((3,), 1 / 3).double())
    ours = (z @ weight.T + bias).softmax(1)
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(z.numpy(), y.numpy()).predict_proba(z.numpy())
    assert np.allclose(ours.numpy(), theirs, atol=0.03)


def test_pfedfda_losses_of_a_fold_are_those_of_its_mixtures() -> None:
    rng = torch.Generator().manual_seed(1)
    draw = torch.randn(4, 40, 6, generator=rng).double()
    own, shared = ((draw[i, :5], draw[i].T @ draw[i] / 40 + torch.eye(6).double()) for i in (0, 1))
    z, y, prior = draw[2], torch.arange(40) % 5, torch.full((5,), 0.2).double()
    pairs = torch.tensor([[0.0, 0.0], [0.3, 0.8], [1.0, 1.0]]).double()
    expected = []
    for a, b in pairs.tolist():
        weight, bias = discriminant(a * own[0] + (1 - a) * shared[0], b * own[1] + (1 - b) * shared[1], prior)
        expected.append(float(F.cross_entropy(z @ weight.T + bias, y)))
    assert Fold(own, shared, prior, z, y).losses(pairs).tolist() == pytest.approx(expected)


def test_pfedfda_repairs_a_covariance_that_is_not_positive_definite() -> None:
    good = torch.eye(4) + 0.1
    assert definite(good) is good
    bad = torch.diag(torch.tensor([1.0, -2.0, 0.0, 3.0]))
    assert float(torch.linalg.eigvalsh(definite(bad)).min()) > 0.5


def test_pfedfda_never_sends_the_head_and_needs_its_bias() -> None:
    _, seen = watch(session("pfedfda", rounds=1))
    assert not any(HEAD & u.tree.keys() for u in seen[0])
    model = SmallNet()
    model.classifier = torch.nn.Linear(16, 10, bias=False)
    with pytest.raises(CoterieError, match="bias"):
        session("pfedfda", model)
