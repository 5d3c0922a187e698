"""Tests of FedNova."""

from typing import Any

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Upload
from coterie.methods.fednova import STEPS, gradients_in
from support.short_runs import STATS, bound, jittered, near, session, watch


def stepped(method: Any, sender: int, tree: T.Tree, steps: int, samples: int) -> Upload:
    return Upload({**tree, STEPS: torch.tensor([steps], dtype=torch.int32)}, {}, sender, samples)


def test_fednova_with_equal_numbers_of_steps_is_fedavg() -> None:
    method = bound("fednova")
    server = method.setup()
    models = [jittered(server["w"], i) for i in (1, 2)]
    after = method.aggregate(server, [stepped(method, i, m, 7, 30 + i) for i, m in enumerate(models)], 1)
    assert near(after["w"], T.mean(models, [30, 31]), 1e-5)


def test_fednova_divides_changes_by_steps_and_averages_statistics() -> None:
    method = bound("fednova")
    server = method.setup()
    models = [jittered(server["w"], i) for i in (1, 2)]
    uploads = [stepped(method, 0, models[0], 2, 10), stepped(method, 1, models[1], 6, 30)]
    after = method.aggregate(server, uploads, 1)["w"]
    effective = 0.25 * 2 + 0.75 * 6
    for k, v in server["w"].items():
        moves = [m[k] - v for m in models]
        normal = v + effective * (0.25 * moves[0] / 2 + 0.75 * moves[1] / 6)
        assert torch.allclose(after[k], 0.25 * models[0][k] + 0.75 * models[1][k] if k in STATS else normal, atol=1e-5)


def test_fednova_ignores_the_move_of_a_client_that_took_no_step() -> None:
    method = bound("fednova")
    server = method.setup()
    after = method.aggregate(server, [stepped(method, 0, jittered(server["w"], 1), 0, 10)], 1)["w"]
    assert all(torch.equal(after[k], server["w"][k]) for k in method.ctx.net.trainable)


def test_fednova_counts_the_steps_of_each_client() -> None:
    s = session("fednova", epochs=3, rounds=1, stragglers=0.5)
    _, seen = watch(s)
    taken = {u.sender: int(u.tree[STEPS]) for u in seen[0]}
    per_epoch = {i: sum(len(p) > 1 for p in s.federation.data(i).train.y.split(16)) for i in taken}
    assert all(n % per_epoch[i] == 0 and 1 <= n // per_epoch[i] <= 3 for i, n in taken.items())
    assert len({n // per_epoch[i] for i, n in taken.items()}) > 1, "the seed draws no straggler"


def test_fednova_weights_of_gradients_under_momentum_are_the_sums_of_the_paper() -> None:
    assert [gradients_in(n, 0.0) for n in (0, 1, 5)] == [0, 1, 5]
    for n in (0, 1, 2, 7):
        by_hand = sum(sum(0.9**j for j in range(n - k)) for k in range(n))
        assert gradients_in(n, 0.9) == pytest.approx(by_hand)
    assert session("fednova", momentum=0.9).method.ctx.momentum == 0.9
    assert session("fednova", optimizer="adam").method.ctx.momentum == 0.0
