"""PRR-FL and CD2-pFed: what travels is a deputy's low frequencies, or a share of the channels."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from sklearn.metrics import f1_score

from coterie.core import tree as T
from coterie.core.method import Upload
from coterie.methods.cd2pfed import CD2pFed, channels
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.methods.prrfl import PRRFL, lessons, macro_f1, stage
from coterie.train.optimisers import Optimiser
from coterie.train.trainer import train
from support.head_methods import (
    batch_of,
    bound,
    declared,
    gradients,
    noisy,
    opened,
    play,
    round_of,
    same,
    scalars,
    value,
)


# ---- PRR-FL ----------------------------------------------------------------------------------------------------------
def deputies(method, count, seed=0):
    """Uploads with different numbers in them."""
    base = T.drop(method.ctx.w0, method.stays)
    return [Upload(noisy(base, lambda k: True, seed + i), {}, i, 10 * (i + 1)) for i in range(count)]


def sent(method, server, client):
    return method.down(server, [client], 2).to(client)


def test_prrfl_of_one_client_aggregates_to_what_it_sent() -> None:
    method, _ = bound(PRRFL)
    upload = deputies(method, 1)[0]
    assert same(sent(method, method.aggregate(method.setup(), [upload], 1), 0), upload.tree)


def test_prrfl_of_identical_clients_is_the_identity() -> None:
    method, _ = bound(PRRFL)
    one = deputies(method, 1)[0]
    server = method.aggregate(method.setup(), [Upload(one.tree, {}, i, 5) for i in range(3)], 1)
    for i in range(3):
        assert all(torch.allclose(v, one.tree[k], atol=1e-5) for k, v in sent(method, server, i).items())


def test_prrfl_without_a_window_leaves_weights_alone() -> None:
    method, _ = bound(PRRFL, r_first=0.0, r_last=0.0)
    uploads = deputies(method, 3)
    server = method.aggregate(method.setup(), uploads, 1)
    assert all(same(sent(method, server, u.sender), u.tree) for u in uploads)
    method, _ = bound(PRRFL)
    server = method.aggregate(method.setup(), uploads, 1)
    assert not same(sent(method, server, 0), uploads[0].tree)


def test_prrfl_averages_amplitudes_over_whoever_answered_and_biases_plainly() -> None:
    method, _ = bound(PRRFL, r_first=1.0, r_last=1.0)  # the half-open window of full size holds every frequency
    a = {k: torch.randn(v.shape) for k, v in deputies(method, 1)[0].tree.items()}
    uploads = [Upload(a, {}, 0, 1), Upload({k: 3 * v for k, v in a.items()}, {}, 4, 99)]
    server = method.aggregate(method.setup(), uploads, 1)
    even = [k for k in a if a[k].ndim == 2 and not any(n % 2 for n in a[k].shape)]
    assert even
    for i in (0, 4):
        got = sent(method, server, i)
        assert all(torch.allclose(got[k], 2 * a[k], atol=1e-4) for k in [*even, "fc1.bias"])
    start = T.drop(method.ctx.w0, method.stays)
    assert same(sent(method, server, 2), start)  # did not answer


def test_prrfl_each_client_gets_its_own_deputy_without_batch_norm() -> None:
    method, clients = bound(PRRFL)
    uploads = deputies(method, 2)
    server = method.aggregate(method.setup(), uploads, 1)
    trees = [sent(method, server, i) for i in (0, 1)]
    assert not torch.allclose(trees[0]["fc1.weight"], trees[1]["fc1.weight"], atol=1e-2)
    assert not method.ctx.group("bn") & (trees[0].keys() | round_of(method, clients[0])[2].tree.keys())


def test_prrfl_personal_model_is_never_overwritten_by_the_server() -> None:
    method, clients = bound(PRRFL)
    state = {**method.init_client(clients[0]), "w": noisy(method.ctx.w0, lambda k: k.startswith("fc"))}
    download = deputies(method, 1, 7)[0].tree
    params, _ = method.begin(state, download, clients[0], 2)
    assert same(T.strip("w:", params), state["w"])
    assert same(T.keep(T.strip("v:", params), lambda k: k in download), download)
    assert same(method.personal(state, download, clients[0])[0], state["w"])


@pytest.mark.parametrize(
    ("deputy", "personal", "expected"),
    [
        (0, 0.5, "recover"),
        (0.34, 0.5, "recover"),
        (0.36, 0.5, "exchange"),
        (0.46, 0.5, "sublimate"),
        (0, 0, "sublimate"),
    ],
)
def test_prrfl_stage_is_recover_only_below_alpha1(deputy: float, personal: float, expected: str) -> None:
    assert stage(deputy, personal, 0.7, 0.9) == expected


@pytest.mark.parametrize(
    ("now", "listens"), [("recover", (False, True)), ("exchange", (True, True)), ("sublimate", (True, False))]
)
def test_prrfl_only_who_listens_learns_from_the_other(now: str, listens: tuple[bool, bool]) -> None:
    w, v = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    got = torch.autograd.grad(lessons(w, v, now), [w, v], allow_unused=True)  # type: ignore[arg-type]
    assert tuple(g is not None and bool(g.any()) for g in got) == listens
    p, q = w.detach().softmax(1), v.detach().softmax(1)
    to_w, to_v = (q * (q / p).log()).sum(1).mean(), (p * (p / q).log()).sum(1).mean()
    expected = listens[0] * to_w + listens[1] * to_v
    assert torch.allclose(lessons(w, v, now).detach(), expected, atol=1e-6)  # type: ignore[arg-type]


def test_prrfl_starts_with_recover_and_with_one_epoch_exchanges_only() -> None:
    for epochs, first in ((1, "exchange"), (2, "recover"), (5, "recover")):
        method, clients = bound(PRRFL, {"epochs": epochs})
        assert opened(method, clients[0])[1]["stage"] == first
    method, clients = bound(PRRFL, {"epochs": 1})
    assert round_of(method, clients[0])[1]["stage"] == "exchange"


def test_prrfl_in_recover_the_personal_model_trains_as_local_only() -> None:
    method, clients = bound(PRRFL, {"epochs": 2})
    params, extras = opened(method, clients[0])
    params, batch = noisy(params, lambda k: k == "v:fc2.weight"), batch_of(clients[0])
    alone, local = gradients(method, params, batch, extras), bound(Local)[0]
    plain = gradients(local, T.strip("w:", params), batch, {})
    assert all(torch.equal(g, alone["w:" + k]) for k, g in plain.items())
    taught = gradients(method, params, batch, {**extras, "stage": "exchange"})
    assert not torch.equal(taught["w:fc1.weight"], alone["w:fc1.weight"])


def test_prrfl_scoring_between_epochs_moves_no_batch_norm_and_follows_the_f1() -> None:
    method, clients = bound(PRRFL)
    params, _ = opened(method, clients[0])
    phases = [replace(phase, epochs=80) for phase in bound(Local)[0].phases(1)]
    good, _, _ = train(method.ctx, Optimiser(), phases, method.ctx.w0, {}, clients[0], 1)
    leaves = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in params.items()}
    leaves |= {"w:" + k: v.clone().requires_grad_("running" not in k) for k, v in good.items()}
    with method.ctx.net.train_mode(), torch.no_grad():
        before = T.clone(leaves)
        _, extras = method.next_stage(leaves, {"stage": "exchange", "left": 3}, clients[0])
    assert same(T.clone(leaves), before)
    assert extras == {"stage": "recover", "left": 2}
    assert macro_f1(lambda x: method.ctx.forward(good, x), clients[0].train.x, clients[0].train.y) > 0.5


def test_macro_f1_is_scikit_learns() -> None:
    rng = torch.Generator().manual_seed(0)
    for y, guess in torch.randint(0, 5, (6, 2, 9), generator=rng):
        expected = f1_score(y.numpy(), guess.numpy(), average="macro", zero_division=0)
        assert macro_f1(lambda x: torch.eye(7)[x], guess, y, chunk=4) == pytest.approx(expected)


# ---- CD2-pFed --------------------------------------------------------------------------------------------------------
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
def test_cd2_what_travels_is_the_complement_of_what_stays(share: float) -> None:
    method, _ = bound(CD2pFed)
    net, one, two = method.ctx.net, method.ctx.w0, noisy(method.ctx.w0, lambda k: True)
    private = channels.masks(net, one, share)
    packed = channels.pack(two, private)
    assert same(channels.masks_of(net, packed, one), private)
    merged = channels.unpack(packed, one, private)
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


# ---- ledger ----------------------------------------------------------------------------------------------------------
def test_declared_bytes_of_prrfl_and_cd2_by_hand() -> None:
    method, _ = bound(PRRFL)
    assert declared(method, 4) == (4 * (scalars(method, "all") - scalars(method, "bn")),) * 2
    method, _ = bound(CD2pFed, ramp=0.0)
    W, bias = scalars(method, "all"), 10
    assert declared(method, 4) == (4 * ((W - bias) // 2 + bias),) * 2
    assert CD2pFed.card.certainty == "C"
