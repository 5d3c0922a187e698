"""Tests of FedBE."""

import pytest
import torch

from coterie.core import tree as T
from coterie.errors import CoterieError
from coterie.methods import build_method
from coterie.methods.fedbe import direction
from support.short_runs import jittered, near, play, same, session, upload_tree


def test_without_training_at_the_server_it_is_fedavg() -> None:
    assert same(play("fedbe", own={"server_epochs": 0}).server["w"], play("fedavg").server["w"])


def test_updates_without_spread_are_drawn_as_their_mean_direction_and_length() -> None:
    moves = torch.tensor([[[3.0, 0.0]], [[0.0, 5.0]]])
    assert torch.allclose(direction(moves, 0.0, torch.Generator()), torch.tensor([[2.0, 2.0]]))
    assert not direction(torch.zeros(2, 3), 0.0, torch.Generator()).any()


def test_drawn_updates_have_the_spread_of_the_directions() -> None:
    """Two orthogonal directions have the deviation 1/2 in each place."""
    moves, rng = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.Generator().manual_seed(0)
    drawn = torch.stack([direction(moves, 0.4, rng) for _ in range(2000)])
    assert drawn.mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.02)
    assert drawn.std(0).tolist() == pytest.approx([0.2, 0.2], abs=0.01)


def test_dirichlet_models_are_convex_combinations_and_keep_the_statistics_of_the_mean() -> None:
    method = session("fedbe", own={"draw": "dirichlet", "models": 4}).method
    server = method.setup()["w"]
    trees = [upload_tree(method, k) for k in (1, 2, 3)]
    mean = T.mean(trees)
    drawn = method.drawn(server, mean, trees, 1)
    assert len(drawn) == 4
    for k in mean:
        every = torch.stack([t[k] for t in trees])
        for one in drawn:
            if k in method.ctx.net.trainable:
                low, high = every.min(0).values - 1e-5, every.max(0).values + 1e-5
                assert ((low <= one[k]) & (one[k] <= high)).all() and not torch.equal(one[k], mean[k])
            else:
                assert torch.equal(one[k], mean[k])


def test_the_ensemble_is_the_sharpened_mean_of_probabilities() -> None:
    method = session("fedbe", own={"sharpness": 0.5}).method
    teachers = [jittered(method.ctx.w0, k, 0.5) for k in (1, 2)]
    x = method.ctx.public_items
    assert x is not None and len(x) == method.ctx.public == 30
    p = sum(method.ctx.outputs(t, x).softmax(1) for t in teachers) / 2
    expected = p**2 / (p**2).sum(1, keepdim=True)
    assert torch.allclose(method.ensemble(teachers), expected, atol=1e-5)


def test_a_student_that_agrees_with_its_targets_has_no_loss() -> None:
    method = session("fedbe").method
    w, x = method.ctx.w0, method.ctx.public_items
    assert x is not None
    targets = method.ctx.outputs(w, x).softmax(1)
    assert float(method.gap(w, x, targets)) == pytest.approx(0, abs=1e-6)
    assert float(method.gap(jittered(w, 1, 0.5), x, targets)) > 1e-3


def test_the_student_comes_closer_to_the_ensemble() -> None:
    method = session("fedbe", own={"server_lr": 0.5, "server_epochs": 30}).method
    w, x = method.ctx.w0, method.ctx.public_items
    assert x is not None
    targets = method.ensemble([jittered(w, 1, 1.0)])
    taught = method.taught(T.clone(w), targets, 1)
    assert float(method.gap(taught, x, targets)) < 0.5 * float(method.gap(w, x, targets))
    assert not near(taught, w, 1e-3)


def test_a_setting_of_the_other_distribution_is_refused() -> None:
    for own in ({"concentration": 2.0}, {"draw": "dirichlet", "spread": 0.5}):
        with pytest.raises(CoterieError, match="has no effect unless draw"):
            build_method("fedbe", own)
