"""Tests of FedCAC."""

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Trained, Upload
from coterie.methods.fedcac import FedCAC, collaborators, overlap
from support.short_runs import bound, jittered, near, play, same, session, size, state, traffic, watch


def test_fedcac_with_tau_zero_is_fedavg() -> None:
    assert same(play("fedcac", own={"tau": 0.0}).server["w"], play("fedavg").server["w"])


@pytest.mark.parametrize("beta", [0.5, 100])
def test_fedcac_with_tau_one_is_uniform_fedavg(beta: float) -> None:
    cac = play("fedcac", own={"tau": 1.0, "beta": beta}, join=1.0, weighting="uniform")
    avg = play("fedavg", join=1.0, weighting="uniform")
    assert bool(cac.server["together"].all()) and near(cac.server["w"], avg.server["w"], 1e-4)


def test_fedcac_masks_have_density_tau_and_each_overlaps_itself() -> None:
    loop = play("fedcac", own={"tau": 0.3}, join=1.0)
    masks = state(loop, 0)["mask"]
    assert masks.keys() == loop.method.ctx.net.trainable
    assert all(int(m.sum()) == int(0.3 * m.numel() + 1e-9) for m in masks.values())
    overlaps = overlap(loop.server["masks"])
    assert torch.allclose(overlaps.diagonal(), torch.ones(5).double()) and bool((overlaps <= 1).all())
    assert torch.equal(loop.server["masks"][0], T.flatten(masks, [k for k in loop.method.ctx.w0 if k in masks]))


def test_fedcac_masks_the_entries_that_training_moved_to_most_effect() -> None:
    s = session("fedcac", own={"tau": 0.25})
    method, data = s.method, s.federation.data(0)
    start = T.clone(method.ctx.w0)
    params = T.clone(start)
    params["classifier.bias"] = torch.tensor([1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, -2.0, 5.0])
    start["classifier.bias"] = torch.tensor([0.0, 0.9, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 5.0])
    kept, _ = method.end({}, Trained(params, {"start": start}), data, 1)
    assert kept["mask"]["classifier.bias"].nonzero().flatten().tolist() == [0, 8]
    assert int(kept["mask"]["fc1.bias"].sum()) == 6  # no entry moved, and the mask still has its density


def test_fedcac_shares_no_critical_entries_after_beta_rounds() -> None:
    s = session("fedcac", own={"beta": 1.5}, join=1.0)
    loop, seen = watch(s)
    assert torch.equal(loop.server["together"], torch.eye(5, dtype=torch.bool))
    custom = T.tagged("c", s.method.down(loop.server, [2], 4).to(2))
    assert near(custom, {k: seen[-1][2].tree[k] for k in custom})


def test_fedcac_starts_from_the_customised_model_in_critical_places_only() -> None:
    s = session("fedcac", join=1.0)
    loop, seen = watch(s)
    assert isinstance(s.method, FedCAC)
    sent, kept = s.method.down(loop.server, [1], 4).to(1), state(loop, 1)
    start, _ = s.method.begin(kept, sent, s.federation.data(1), 4).model
    friends = loop.server["together"][1].nonzero().flatten().tolist()
    assert 1 in friends
    mean = T.mean([{k: seen[-1][j].tree[k] for k in kept["mask"]} for j in friends])
    for k, mask in kept["mask"].items():
        assert torch.equal(start[k][~mask], loop.server["w"][k][~mask])
        assert torch.allclose(start[k][mask], mean[k][mask], atol=1e-6)
    assert same(start, s.method.personal(kept, sent, s.federation.data(1))[0])


def test_fedcac_keeps_masks_and_models_of_absent_clients() -> None:
    method = bound("fedcac")
    masks = {k: torch.rand(v.shape) > 0.5 for k, v in method.ctx.w0.items() if k in method.ctx.net.trainable}
    send = [Upload({**jittered(method.ctx.w0, i), **T.tag("mask", masks)}, {}, i, 10) for i in (4, 2)]
    one = method.aggregate(method.setup(), send[:1], 1)
    two = method.aggregate(one, send[1:], 2)
    assert two["bank"]["ids"] == [4, 2] and torch.equal(two["masks"][0], one["masks"][0])
    assert torch.equal(two["bank"]["flat"][0], one["bank"]["flat"][0])


def test_fedcac_overlap_is_one_with_itself_and_counts_common_entries() -> None:
    masks = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]).bool()
    assert overlap(masks).tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]
    assert torch.equal(overlap(torch.zeros(2, 3).bool()), torch.ones(2, 2, dtype=torch.float64))


def test_fedcac_has_fewer_collaborators_in_later_rounds_and_none_after_beta_rounds() -> None:
    o = torch.tensor([[1.0, 0.9, 0.1], [0.9, 1.0, 0.5], [0.1, 0.5, 1.0]], dtype=torch.float64)
    assert collaborators(o, 0, 100).tolist() == [[True, True, False], [True, True, True], [False, True, True]]
    assert torch.equal(collaborators(o, 90, 100), torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).bool())
    assert torch.equal(collaborators(o, 101, 100), torch.eye(3).bool())
    for n in range(2, 30):  # some of these means are rounded up
        assert collaborators(torch.full((n, n), 0.7, dtype=torch.float64), 500, 100).all()
    assert collaborators(torch.ones(1, 1), 1, 100).tolist() == [[True]]


def test_fedcac_counts_masks_as_bits_and_two_models_down() -> None:
    s = session("fedcac", join=1.0)
    loop, _ = watch(s)
    w, masked = size(s.method.ctx.w0), size(s.method.ctx.w0, set(s.method.ctx.net.trainable))
    bits = sum((s.method.ctx.w0[k].numel() + 7) // 8 for k in s.method.ctx.net.trainable)
    assert traffic(loop, "up") == [w + bits] * 3 and traffic(loop, "down") == [w, w + masked, w + masked]
