"""Tests of FedTGP."""

import pytest
import torch
import torch.nn.functional as F

from coterie.methods.fedtgp import made, slope, widest_gap
from coterie.parts.small_layers import linear
from support.short_runs import near, session, watch


def test_fedtgp_slope_is_the_gradient_of_its_loss() -> None:
    rng = torch.Generator().manual_seed(0)
    net = {"embedding": torch.randn(5, 7, generator=rng), **linear("1", 7, 7, rng), **linear("2", 7, 7, rng)}
    z, y = torch.randn(9, 7, generator=rng), torch.randint(5, (9,), generator=rng)
    leaves = {k: v.clone().requires_grad_() for k, v in net.items()}
    loss = F.cross_entropy(-torch.cdist(z, made(leaves)) - 2.0 * F.one_hot(y, 5), y)
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert near(slope(net, z, y, 2.0), expected)


def test_fedtgp_margin_is_the_widest_gap_between_neighbouring_classes() -> None:
    z = torch.tensor([[0.0], [1.0], [4.0], [5.0], [5.0]])
    assert widest_gap(z, torch.tensor([0, 1, 2, 3, 3]), 6) == pytest.approx(1.0)
    assert widest_gap(z, torch.tensor([0, 0, 2, 2, 2]), 6) == pytest.approx(14 / 3 - 0.5)
    assert widest_gap(z, torch.zeros(5, dtype=torch.long), 6) == float("inf")


def test_fedtgp_makes_prototypes_for_all_classes_that_are_closest_to_their_own_means() -> None:
    s = session("fedtgp", own={"server_epochs": 100}, rounds=2, join=1.0)
    loop, seen = watch(s)
    rows = [(u.tree["x:means"], u.tree["x:labels"].long()) for u in seen[-1]]
    z, y = torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])
    closest = torch.cdist(z, loop.server["prototypes"]).argmin(1)
    assert float((closest == y).float().mean()) > 0.5
