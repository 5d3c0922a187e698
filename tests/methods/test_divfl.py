"""Tests of DivFL."""

from itertools import combinations

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Batch
from coterie.methods.divfl import representatives
from coterie.parts.gradient import grad
from support.short_runs import CLIENTS, near, play, same, session, size, traffic, watch


def cost(rows: torch.Tensor, chosen: list[int]) -> float:
    return float(torch.cdist(rows.double(), rows.double())[:, chosen].min(1).values.sum())


def test_one_representative_of_each_of_three_groups_is_chosen() -> None:
    rows = torch.tensor([[0.0, 0], [0.1, 0], [0, 0.1], [9, 0], [9.1, 0], [0, 9], [0, 9.2]])
    chosen = representatives(rows, 3)
    groups = [0, 0, 0, 1, 1, 2, 2]
    assert groups[chosen[0]] == 0 and {groups[i] for i in chosen} == {0, 1, 2}


@pytest.mark.parametrize("seed", range(4))
def test_the_greedy_choice_is_within_its_bound_of_the_best(seed: int) -> None:
    """Facility location is submodular, so greedy gains are at least 1 - 1/e of the best ones."""
    rows = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))
    chosen = representatives(rows, 3)
    none = float(2 * torch.cdist(rows, rows).sum(0).max())  # the cost before the first choice, as in the authors' code
    best = min(cost(rows, list(c)) for c in combinations(range(7), 3))
    assert len(set(chosen)) == 3
    assert none - cost(rows, chosen) >= (1 - 1 / torch.e) * (none - best)
    assert cost(rows, representatives(rows, 1)) == min(cost(rows, [k]) for k in range(7))


def test_full_participation_is_fedavg() -> None:
    assert same(play("divfl", join=1.0).server["w"], play("fedavg", join=1.0).server["w"])


def test_gradients_are_those_of_the_whole_training_part_at_the_received_model() -> None:
    s = session("divfl", rounds=1)
    method, data = s.method, s.federation.data(0)
    w = method.ctx.w0
    whole = grad(lambda p: method.ctx.loss(p, Batch(*data.train)), w, list(method.ctx.net.trainable))
    assert near(method.slope(w, data), {k: whole[k] for k in method.slope(w, data)}, 1e-6)
    _, seen = watch(s)
    assert [u.sender for u in seen[0]] == list(CLIENTS)  # the opening round
    assert all(not T.untagged(u.tree) for u in seen[0]) and all(T.untagged(u.tree) for u in seen[1])


def test_a_client_without_a_gradient_takes_part_first() -> None:
    method = session("divfl", join=0.4).method
    known = {i: torch.full((3,), float(i)) for i in (0, 1, 2, 4)}
    assert 3 in method.sample({**method.setup(), "gradients": known}, 1, torch.Generator())
    assert method.sample(method.setup(), 1, torch.Generator()) == [0, 1]


def test_uploads_hold_the_model_and_a_gradient() -> None:
    loop = play("divfl")
    whole, trained = size(loop.server["w"]), size(loop.method.ctx.w0, set(loop.method.ctx.net.trainable))
    assert traffic(loop, "up") == [trained, *[whole + trained] * 3]
