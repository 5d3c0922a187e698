"""Tests of CD2-pFed."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from coterie.methods.cd2pfed import channels
from coterie.methods.cd2pfed.method import CD2pFed
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from support.head_methods import batch_of, bound, declared, gradients, noisy, opened, play, round_of, same, value


def test_cd2_without_private_channels_is_fedavg(tmp_path: Path) -> None:
    ours, fedavg = play(CD2pFed, tmp_path, p_max=0.0, distil=0.0), play(FedAvg, tmp_path)
    assert same(ours.server["w"], fedavg.server["w"])
    assert ours.bytes == fedavg.bytes


def test_cd2_with_all_channels_private_is_local_only(tmp_path: Path) -> None:
    ours, local = play(CD2pFed, tmp_path, p_max=1.0, ramp=0.0), play(Local, tmp_path)
    states = [(ours.runtime.states.get(i), local.runtime.states.get(i)) for i in local.method.ctx.clients]
    assert all(same(a["w"], b["own"]) for a, b in states if b is not None) and any(b for _, b in states)
    assert declared(ours.method, 4) == (0, 0)


def test_cd2_share_grows_from_nothing_and_private_channels_stay_private() -> None:
    method, _ = bound(CD2pFed, {"rounds": 10})
    shares = [method.share(t) for t in range(1, 13)]
    assert shares[0] == 0 and shares[10] == shares[11] == 0.5
    assert torch.allclose(torch.tensor(shares[:11]).diff(), torch.tensor(0.05))
    masks = [channels.masks(method.ctx.net, method.ctx.w0, p) for p in (0.0, 0.2, 0.5, 0.9, 1.0)]
    for small, large in pairwise(masks):
        assert all(bool((large[k] | ~small[k]).all()) for k in small)
    assert not any(bool(m.any()) for m in masks[0].values()) and all(bool(m.all()) for m in masks[-1].values())


def test_cd2_splits_outputs_of_layers_with_their_norm_and_inputs_of_the_head() -> None:
    method, _ = bound(CD2pFed)
    m = channels.masks(method.ctx.net, method.ctx.w0, 0.5)
    assert m["fc1.weight"][:12].all() and not m["fc1.weight"][12:].any()
    for name in ("fc1.bias", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"):
        assert m[name].tolist() == [True] * 12 + [False] * 12, name
    assert m["classifier.weight"][:, :8].all() and not m["classifier.weight"][:, 8:].any()
    assert not m["classifier.bias"].any()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_cd2_sent_entries_and_private_entries_make_up_the_model(share: float) -> None:
    method, _ = bound(CD2pFed)
    net, one, two = method.ctx.net, method.ctx.w0, noisy(method.ctx.w0, lambda k: True)
    private = channels.masks(net, one, share)
    packed = channels.shared_positions(two, private)
    assert same(channels.masks_of(net, packed, one), private)
    merged = channels.with_shared(packed, one, private)
    assert all(torch.equal(v, torch.where(private[k], one[k], two[k])) for k, v in merged.items())
    assert sum(v.numel() for v in packed.values()) == sum(int((~m).sum()) for m in private.values())
    stats = {k: torch.zeros_like(v) for k, v in one.items() if k in method.ctx.group("bn_stats")}
    halves = [channels.sub_net(net, one, side) for side in (private, {k: ~m for k, m in private.items()})]
    split = [k for k in one if channels.split_axis(net, k) is not None and k not in stats]
    assert all(torch.equal(halves[0][k] + halves[1][k], one[k]) for k in split)


def test_cd2_sub_networks_do_not_see_the_other_side_and_move_no_statistics() -> None:
    method, clients = bound(CD2pFed)
    net, w, x = method.ctx.net, method.ctx.w0, clients[0].train.x
    private = channels.masks(net, w, 0.5)
    stats = method.ctx.group("bn_stats")
    other = {k: torch.where(private[k], v + 1, v) if k not in stats else v for k, v in w.items()}
    shared = {k: ~m for k, m in private.items()}
    outs = []
    for tree in (w, other):
        leaves = {k: v.clone().requires_grad_(k not in stats) for k, v in tree.items()}
        with net.train_mode():
            outs.append(net.forward(channels.sub_net(net, leaves, shared), x))
        assert all(torch.equal(leaves[k], w[k]) for k in stats)
    assert torch.equal(*outs) and not torch.allclose(net.forward(w, x), net.forward(other, x))


def test_cd2_distils_both_ways_and_only_when_both_sub_networks_exist() -> None:
    method, clients = bound(CD2pFed, ramp=0.0)
    params, extras = opened(method, clients[0])
    batch = batch_of(clients[0])
    assert extras["distil"] and value(method, params, batch, extras) > method.ctx.ce(params, batch)
    with_, without = (gradients(method, params, batch, {**extras, "distil": d}) for d in (True, False))
    private = extras["private"]["fc1.weight"]
    change = with_["fc1.weight"] - without["fc1.weight"]
    assert change[private].any() and change[~private].any()
    for own in ({"p_max": 0.5}, {"p_max": 0.01, "ramp": 0.0}, {"p_max": 1.0, "ramp": 0.0}):  # first round: p = 0
        method, clients = bound(CD2pFed, **own)
        assert not opened(method, clients[0])[1]["distil"]


def test_cd2_averaging_stays_halfway_between_the_epochs() -> None:
    run = {"epochs": 1}
    (full, clients), (half, _) = bound(CD2pFed, run), bound(CD2pFed, run, average=0.5)
    end, mid = (round_of(m, clients[0])[0] for m in (full, half))
    for k in full.ctx.net.trainable:
        assert torch.allclose(mid[k], (end[k] + full.ctx.w0[k]) / 2, atol=1e-6)


def test_cd2_private_entries_are_the_clients_own_and_shared_ones_the_servers() -> None:
    method, clients = bound(CD2pFed, ramp=0.0)
    own = noisy(method.ctx.w0, lambda k: True)
    download = method.down(method.setup(), [0], 1).to(0)
    params, extras = method.personal({"w": own}, download, clients[0])
    for k, v in params.items():
        assert torch.equal(v, torch.where(extras["private"][k], own[k], method.ctx.w0[k]))


def test_cd2_private_channels_grow_and_stay() -> None:
    w = torch.randn(8, 4, 3, 3)
    small, large = channels.private_entries(w, 0.25), channels.private_entries(w, 0.5)
    assert int(small.sum()) == 2 * 36 and int(large.sum()) == 4 * 36 and bool((large | ~small).all())
    assert int(channels.private_entries(w, 0.5, dim=1).sum()) == 8 * 2 * 9
    assert not channels.private_entries(w, 0.0).any() and channels.private_entries(w, 1.0).all()
