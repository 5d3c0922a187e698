"""Tests of Power-of-Choice."""

import torch

from coterie.core.method import Trained, Upload
from coterie.methods.powerofchoice import STEPS_LOSS
from support.short_runs import CLIENTS, play, same, session, upload_tree, watch


def test_as_many_candidates_as_participants_are_a_uniform_draw() -> None:
    """Then the losses decide nothing, and the run is FedAvg with a uniform mean."""
    own = {"candidates": 1, "draw": "uniform"}
    chosen, avg = play("power-of-choice", own=own), play("fedavg", weighting="uniform")
    assert same(chosen.server["w"], avg.server["w"])


def test_the_candidates_with_the_highest_last_loss_take_part() -> None:
    method = session("power-of-choice", own={"candidates": 5, "draw": "uniform"}, join=0.4).method
    server = {**method.setup(), "losses": {0: 0.1, 1: 3.0, 2: 0.2, 3: 2.0, 4: 1.0}}
    assert method.sample(server, 1, torch.Generator()) == [1, 3]
    assert 2 in method.sample({**server, "losses": {0: 0.1, 1: 3.0, 3: 2.0, 4: 1.0}}, 1, torch.Generator())


def test_only_candidates_can_take_part() -> None:
    method = session("power-of-choice", own={"candidates": 3}, join=0.4).method
    server = {**method.setup(), "samples": {0: 5, 1: 5, 2: 5, 3: 0, 4: 0}, "losses": {0: 1.0, 1: 2.0, 2: 3.0, 3: 9.0}}
    for t in range(5):
        assert method.sample(server, 1, torch.Generator().manual_seed(t)) == [1, 2]


def test_a_client_sends_the_mean_loss_of_its_steps_and_the_server_keeps_the_last_one() -> None:
    s = session("power-of-choice")
    method, data = s.method, s.federation.data(0)
    done = Trained(method.ctx.w0, aux=[torch.tensor(1.0), torch.tensor(3.0)], steps=2)
    _, sent = method.end({}, done, data, 1)
    assert float(sent.tree[STEPS_LOSS]) == 2.0
    server = {**method.setup(), "losses": {0: 7.0, 1: 5.0}}
    ups = [Upload({**upload_tree(method, 1), STEPS_LOSS: torch.tensor([2.0])}, {}, 0, 10)]
    new = method.aggregate(server, ups, 1)
    assert new["losses"] == {0: 2.0, 1: 5.0} and new["w"].keys() == server["w"].keys()


def test_every_client_takes_part_before_one_does_so_again_if_all_are_candidates() -> None:
    _, seen = watch(session("power-of-choice", own={"candidates": 5, "draw": "uniform"}, join=0.2, rounds=5))
    assert sorted(u.sender for round in seen for u in round) == list(CLIENTS)
