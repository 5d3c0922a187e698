"""FedGMH: its properties, numbered, and its settings."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from coterie.config import settings
from coterie.core import tree as T
from coterie.core.method import Moment, Trained, Upload
from coterie.data.dataset import Dataset
from coterie.data.federation import federate
from coterie.engine.codec import equal
from coterie.engine.messages import Job, TrainRequest
from coterie.engine.session import prepare
from coterie.errors import CoterieError
from coterie.methods import build_method
from coterie.methods.fedgmh.heads import critical_mask, square_mask
from coterie.methods.fedgmh.mended import FedGMHMended, held_labels
from coterie.methods.fedgmh.text import FedGMH
from coterie.methods.fedgmh.variants import FedGMHa, FedGMHo, FedGMHoa
from coterie.methods.local import Local
from coterie.models.registry import build_model
from coterie.parts.linear_heads import Heads, head_step
from coterie.parts.masks import criticality
from support.refusals import refuses
from support.toy import Toy, begin, bind, clients, events, open_toy, play

D, S = 6, 3  # of the toy's model
L = D * S + S
W, B = "2.weight", "2.bias"


def head(tree):
    return {k: tree[k] for k in (W, B)}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def stack(seed=0, heads=S):
    rng = torch.Generator().manual_seed(seed)
    return {W: torch.randn(heads, S, D, generator=rng), B: torch.randn(heads, S, generator=rng)}


def one_label(label=1):
    return Toy([(torch.randn(8, 4, generator=torch.Generator().manual_seed(5)), torch.full((8,), label))], S)


def started(method, data, server):
    """The head with which a client begins, once the server knows its labels."""
    state, up = method.end(method.init_client(data), Trained({}), data, 0)
    server = method.aggregate(server, [Upload(up.tree, sender=data.client)], 0) if method.opening() else server
    params, _ = method.begin(state, method.down(server, [data.client], 1).to(data.client), data, 1).model
    return head(params)


def sent(z, y, sender=0, counts=None):
    tree = {"x:means": z, "x:labels": torch.as_tensor(y, dtype=torch.int32)}
    return Upload(
        tree | ({} if counts is None else {"x:counts": torch.tensor(counts, dtype=torch.int32)}), sender=sender
    )


def means(method, data):
    """What a client uploads whose model is the initial one."""
    params, extras = method.begin(method.init_client(data), {}, data, 1).model
    return method.end(method.init_client(data), Trained(params, extras), data, 1)[1].tree


def sizes(method, labels, server=None):
    """Declared bytes, up and down, of client 0 in round 1 with so many labels."""
    known = {**method.setup(), "labels": {0: torch.arange(labels, dtype=torch.int32)}}
    now = Moment(server or known, 0, 1)
    return method.schema("up", now).nbytes(labels=labels), method.schema("down", now).nbytes()


# ---- the client ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_1_beta_one_replaces_the_whole_head_by_g_and_beta_zero_leaves_it(tmp_path: Path, beta: float) -> None:
    loop = play(FedGMH, tmp_path, {"beta": beta}, rounds=2)
    for i in range(5):
        state, data = loop.runtime.states.get(i), clients().data(i)
        params, _ = loop.method.begin(state, loop.method.down(loop.server, [i], 3).to(i), data, 3).model
        q = data.label_counts / len(data.train)
        g = {k: torch.einsum("s,s...->...", q, v) for k, v in loop.server["heads"].items()}
        assert not torch.allclose(state["own"][W], g[W], atol=1e-3)
        expected = g if beta else state["own"]
        assert all(torch.allclose(params[k], expected[k], atol=0 if not beta else 1e-6) for k in (W, B))
        assert same(T.drop(params, (W, B).__contains__), T.drop(state["own"], (W, B).__contains__))


def test_2_shares_sum_to_one_and_equal_heads_mix_to_that_head() -> None:
    method = bind(FedGMH, {"first_psi": "ones"})
    server = method.setup()
    other = {k: v[:1].expand_as(v).clone() for k, v in stack().items()}
    for i in range(5):
        got = started(method, clients().data(i), {**server, "heads": other})
        assert all(torch.allclose(got[k], other[k][0], atol=1e-6) for k in got)


def test_3_a_client_with_one_label_gets_its_head_exactly() -> None:
    method = bind(FedGMH, {"first_psi": "ones"}, data=one_label())
    heads = stack()
    assert same(started(method, one_label().data(0), {**method.setup(), "heads": heads}), T.row(heads, 1))


@pytest.mark.parametrize("scope", ["head", "tensor"])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.77])
def test_4_the_mask_has_floor_beta_l_ones_and_they_are_the_most_critical(tmp_path: Path, beta, scope) -> None:
    loop = play(FedGMH, tmp_path, {"beta": beta, "mask_scope": scope}, rounds=1)
    for i in range(5):
        state = loop.runtime.states.get(i)
        p = criticality(head(loop.method.ctx.w0), head(state["own"]))  # round 1 is the first: the head began as h^0
        groups = [(W,), (B,)] if scope == "tensor" else [(W, B)]
        for names in groups:
            mask, score = (torch.cat([t[k].flatten() for k in names]) for t in (state["mask"], p))
            assert mask.dtype == torch.bool and int(mask.sum()) == int(beta * len(mask) + 1e-9)
            if mask.any():
                assert score[mask].min() >= score[~mask].max()


def test_4_what_counts_is_the_change_since_the_write_in() -> None:
    method, data = bind(FedGMH), one_label().data(0)
    mask = critical_mask(head(method.ctx.w0), head(method.ctx.w0), 0.5)
    state = {"own": method.ctx.w0, "labels": torch.tensor([1]), "mask": mask}
    params, extras = method.begin(state, T.tag("h", {k: v[:1] for k, v in stack().items()}), data, 2).model
    assert not same(head(params), head(state["own"]))
    trained = {**params, W: params[W] + 0.1}
    mask = method.end(state, Trained(trained, extras), data, 2)[0]["mask"]
    assert same(mask, critical_mask(head(params), head(trained), 0.5))
    assert not same(mask, critical_mask(head(state["own"]), head(trained), 0.5))


def test_5_criticality_ignores_a_common_flip_of_signs_and_is_zero_where_nothing_moved() -> None:
    before, after = T.row(stack(0), 0), T.row(stack(1), 0)
    flipped = criticality({k: -v for k, v in before.items()}, {k: -v for k, v in after.items()})
    assert same(criticality(before, after), flipped)
    still = {**after, W: torch.where(torch.arange(D) == 2, before[W], after[W])}
    assert (criticality(before, still)[W][:, 2] == 0).all() and not critical_mask(before, still, 0.5)[W][:, 2].any()


def test_6_no_model_is_sent_and_only_participants_change(tmp_path: Path) -> None:
    loop = begin(open_toy(FedGMH, tmp_path, rounds=3, join=0.4))
    loop.step()
    for _ in (1, 2, 3):
        before = {i: loop.runtime.states.get(i) for i in range(5)}
        loop.step()
        event = events(loop)[-1]
        assert set(event["bytes"]["device-cloud"]["up"]) == {"prototypes"}
        assert set(event["bytes"]["device-cloud"]["down"]) == {"heads"}
        for i in range(5):
            moved = not torch.equal(before[i]["own"]["0.weight"], loop.runtime.states.get(i)["own"]["0.weight"])
            assert moved == (i in event["participants"])
            if not moved:
                assert equal(before[i], loop.runtime.states.get(i))
    loop.folder.close()


def test_10_mean_features_are_class_means_whatever_the_batches() -> None:
    data, method = clients().data(3), bind(FedGMH)
    z = method.ctx.features(method.ctx.w0, data.train.x)
    up = means(method, data)
    for row, label in zip(up["x:means"], up["x:labels"].tolist(), strict=True):
        assert torch.allclose(row, z[data.train.y == label].mean(0), atol=1e-6)
    small = bind(FedGMH, batch=1)
    assert same(means(small, data), up)


@pytest.mark.parametrize("cls", [FedGMHa, FedGMHoa])
def test_11_averaging_is_the_identity_where_own_and_received_head_agree(cls) -> None:
    method = bind(cls, data=one_label())
    assert same(started(method, one_label().data(0), method.setup()), head(method.ctx.w0))
    heads = stack(heads=1 if cls is FedGMHoa else S)
    got = started(method, one_label().data(0), {**method.setup(), "heads": heads})
    row = T.row(heads, 0 if cls is FedGMHoa else 1)
    assert all(torch.equal(got[k], (method.ctx.w0[k] + row[k]) / 2) for k in got)


@pytest.mark.parametrize("cls", [FedGMH, FedGMHo])
def test_14_the_first_participation_is_plain_local_training(tmp_path: Path, cls) -> None:
    ours, local = (play(c, tmp_path, rounds=4, join=0.4) for c in (cls, Local))
    seen: set[int] = set()
    first = [i for e in events(ours) if e["round"] > 0 for i in e["participants"] if i not in seen and not seen.add(i)]
    once = [i for i in first if sum(i in e["participants"] for e in events(ours) if e["round"] > 0) == 1]
    assert any(i not in events(ours)[-4]["participants"] for i in once)  # also one whose first round is a later one
    for i in once:
        assert same(ours.runtime.states.get(i)["own"], local.runtime.states.get(i)["own"])
    again = next(i for i in first if i not in once)
    assert not same(ours.runtime.states.get(again)["own"], local.runtime.states.get(again)["own"])


# ---- the server ------------------------------------------------------------------------------------------------------
def test_7_a_step_raises_the_label_and_lowers_the_loss_and_gradient_rows_cancel() -> None:
    method = bind(FedGMH, {"eta_h": 0.01})
    server, f = {**method.setup(), "heads": stack()}, torch.rand(1, D)
    new = method.aggregate(server, [sent(f, [2])], 1)["heads"]
    old = server["heads"]
    before, after = ((F.linear(f, h[W][2], h[B][2])) for h in (old, new))
    assert after[0, 2] > before[0, 2]
    assert F.cross_entropy(after, torch.tensor([2])) < F.cross_entropy(before, torch.tensor([2]))
    for k in (W, B):
        assert torch.allclose((new[k][2] - old[k][2]).sum(0), torch.zeros(()), atol=1e-6)
    w = old[W][2].clone().requires_grad_()
    F.cross_entropy(F.linear(f, w, old[B][2]), torch.tensor([2])).backward()
    assert torch.allclose(new[W][2], old[W][2] - 0.01 * w.grad, atol=1e-6)


def test_8_heads_of_labels_nobody_sent_keep_their_bits() -> None:
    method = bind(FedGMH, {"head_weight_decay": 0.1})
    server = {**method.setup(), "heads": stack()}
    new = method.aggregate(server, [sent(torch.rand(2, D), [0, 2])], 1)["heads"]
    for k in (W, B):
        assert torch.equal(new[k][1], server["heads"][k][1]) and not torch.equal(new[k][0], server["heads"][k][0])


def test_9_the_same_vector_twice_is_the_same_step() -> None:
    method = bind(FedGMH)
    server, f = {**method.setup(), "heads": stack()}, torch.rand(1, D)
    once = method.aggregate(server, [sent(f, [1])], 1)["heads"]
    twice = method.aggregate(server, [sent(f, [1], 0), sent(f, [1], 1)], 1)["heads"]
    assert all(torch.allclose(once[k], twice[k], atol=1e-6) for k in once)


def test_15_three_hundred_steps_at_rate_one_saturate_and_do_not_diverge() -> None:
    method = bind(FedGMH)
    rng = torch.Generator().manual_seed(0)
    for norm in (0.8, 8.0, 30.0):
        f = F.normalize(torch.rand(S, D, generator=rng), dim=1) * norm
        server, norms = {**method.setup(), "heads": stack()}, {}
        for t in range(1, 301):
            server = method.aggregate(server, [sent(f, range(S))], t)
            norms[t] = T.flatten(server["heads"]).norm()
        heads = server["heads"]
        p = (torch.einsum("sd,srd->sr", f, heads[W]) + heads[B]).softmax(1).diagonal()
        assert T.finite(heads) and (p > 0.99).all() and norms[300] < 1.2 * norms[100]


def test_one_head_learns_from_all_pairs_in_one_step() -> None:
    """GMH-o's step is plain SGD on the mean cross-entropy of every received pair."""
    method = bind(FedGMHo)
    server, f, y = method.setup(), torch.rand(4, D), torch.tensor([0, 2, 2, 1])
    w = server["heads"][W][0].clone().requires_grad_()
    F.cross_entropy(F.linear(f, w, server["heads"][B][0]), y).backward()
    new = method.aggregate(server, [sent(f[:2], y[:2]), sent(f[2:], y[2:], 1)], 1)["heads"]
    assert torch.allclose(new[W][0], server["heads"][W][0] - w.grad, atol=1e-6)


def test_weighting_by_samples_weighs_vectors_by_their_counts() -> None:
    method = bind(FedGMH, weighting="samples")
    server, f = {**method.setup(), "heads": stack()}, torch.rand(2, D)
    weighed = method.aggregate(server, [sent(f[:1], [1], 0, [3]), sent(f[1:], [1], 1, [1])], 1)["heads"]
    repeated = bind(FedGMH).aggregate(server, [sent(f[[0, 0, 0, 1]], [1, 1, 1, 1])], 1)["heads"]
    assert all(torch.allclose(weighed[k], repeated[k], atol=1e-6) for k in repeated)
    large = replace(sent(f[:1], [1], 0), samples=300)
    alike = [bind(FedGMH).aggregate(server, [u, sent(f[1:], [1], 1)], 1)["heads"] for u in (large, sent(f[:1], [1]))]
    assert same(*alike) and not same(alike[0], weighed) and FedGMH.weighting == "uniform"


# ---- bytes, data and settings ----------------------------------------------------------------------------------------
def test_12_bytes_are_those_of_the_table_and_labels_are_sent_once_before(tmp_path: Path) -> None:
    loop = play(FedGMH, tmp_path, rounds=1)
    labels = sum(len(y.unique()) for _, y in clients().parts)
    opening, round1 = (e["bytes"]["device-cloud"] for e in events(loop))
    assert opening == {"up": {"prototypes": 4 * labels}, "down": {}}
    assert round1 == {"down": {"heads": 4 * L * labels}, "up": {"prototypes": labels * (4 * D + 4)}}
    images = Toy([(torch.rand(4, 1, 28, 28), torch.tensor([0, 1, 2, 9]))], 10)
    paper = bind(FedGMH, data=images, model=build_model("fedgmh-cnn", (1, 28, 28), 10))
    assert sizes(paper, 1)[1] / 1024 == pytest.approx(20.0391, abs=1e-4)
    assert sizes(paper, 5) == (5 * (4 * 512 + 4), 5 * 4 * 5130)


def test_a_client_stores_its_model_and_a_mask_of_one_byte_per_entry_of_the_head() -> None:
    """The paper's network for ten classes: a model of 3431.79 KB, a mask of 5.01 KB, and 20.04 KB for a head."""
    images = Toy([(torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 9]))], 10)
    method, data = bind(FedGMH, data=images, model=build_model("fedgmh-cnn", (3, 32, 32), 10)), images.data(0)
    params, extras = method.begin(method.init_client(data), {}, data, 1).model
    state, _ = method.end(method.init_client(data), Trained(params, extras), data, 1)

    def kilobytes(tree):
        return sum(v.numel() * v.element_size() for v in tree.values()) / 1024

    assert kilobytes(state["own"]) == pytest.approx(3431.79, abs=0.005)
    assert kilobytes(state["mask"]) == pytest.approx(5.01, abs=0.005)
    assert {k for k, v in state.items() if k not in ("own", "mask")} == {"labels", "joined"}
    body = kilobytes(T.drop(state["own"], method.ctx.group("head").__contains__))
    assert body == pytest.approx(3411.75, abs=0.005) and body / 3431.79 == pytest.approx(0.9942, abs=5e-5)
    up, down = (n / 1024 for n in sizes(method, 100))  # of 100 labels, with the head of ten classes, as printed
    assert up == pytest.approx(200.39, abs=0.005) and down == pytest.approx(2004, abs=0.5)
    assert (down + 5.01) / 3431.79 == pytest.approx(0.5854, abs=2e-4)


def test_download_all_and_counts_change_bytes_as_declared(tmp_path: Path) -> None:
    own, everything = (play(FedGMH, tmp_path, {"download": how}, rounds=3) for how in ("own", "all"))
    for i in range(5):
        a, b = own.runtime.states.get(i)["own"], everything.runtime.states.get(i)["own"]
        assert all(torch.allclose(a[k], b[k], atol=1e-5) for k in a)
    assert everything.bytes["device-cloud"]["down"] == {"heads": 3 * 5 * S * 4 * L}
    assert sizes(bind(FedGMH, weighting="samples"), 2)[0] == 2 * (4 * D + 8)
    assert sizes(bind(FedGMHo), 2)[1] == 4 * L


def test_13_exdir_gives_at_most_c_labels_and_every_sample_once() -> None:
    y = torch.arange(2000) % 10
    data = Dataset("labels", torch.zeros(2000, 1), y, tuple("0123456789"), torch.zeros(2000, dtype=torch.bool))
    fed = federate(data, settings(method="local", partition="exdir(2, 0.5)", clients=20).federation, 0)
    assert ((fed.label_counts("all") > 0).sum(1) <= 2).all()
    dealt = np.sort(np.concatenate([fed.indices(i, p) for i in fed.clients for p in ("train", "val", "test")]))
    assert (dealt == np.arange(2000)).all()


IDLE = [
    (FedGMH, {"write": "average", "beta": 0.1}, "beta = 0.1 has no effect unless write = mask"),
    (FedGMHa, {"beta": 0.1}, "beta = 0.1 has no effect unless write = mask"),
    (FedGMH, {"received_share": 0.3}, "received_share = 0.3 has no effect unless write = average"),
    (FedGMHo, {"download": "all"}, "download = all has no effect unless heads = per_label"),
    (FedGMH, {"criticality": "square", "mask_scope": "tensor"}, "no effect unless criticality = product"),
    (FedGMHMended, {"server_steps": 0, "eta_h": 0.1}, "eta_h = 0.1 has no effect unless server_steps is above 0"),
]


@pytest.mark.parametrize(("cls", "given", "words"), IDLE)
def test_a_setting_without_effect_is_refused(cls, given, words) -> None:
    with pytest.raises(CoterieError, match=words):
        build_method(cls, given)
    assert (
        build_method(FedGMHa, {"reading": "code"}).hp.received_share == 1
    )  # values of the reading itself are no mistakes


@pytest.mark.parametrize("beta", [-0.1, 1.5])
@pytest.mark.parametrize("cls", [FedGMH, FedGMHo])
def test_beta_outside_zero_to_one_is_refused_in_one_sentence(cls, beta: float) -> None:
    with pytest.raises(CoterieError, match=rf"beta = {beta} is invalid") as e:
        build_method(cls, {"beta": beta})
    assert "\n" not in str(e.value)


def test_decay_counts_rounds_or_participations(tmp_path: Path) -> None:
    """With one whole batch per epoch the first step is lr times the gradient, so its length shows the rate."""
    steps = {}
    for how in ("round", "participation"):
        loop = open_toy(FedGMH, tmp_path, {"decay_on": how}, batch=100, lr=0.1, lr_decay=0.5)
        data = clients().data(0)
        state = loop.method.init_client(data)
        new = loop.runtime.clients.train([Job(TrainRequest(0, 4), state)])[0].state
        steps[how] = (new["own"]["0.weight"] - state["own"]["0.weight"]).norm()
        assert new["joined"] == 1
        loop.folder.close()
    assert float(steps["participation"]) == pytest.approx(8 * float(steps["round"]), rel=1e-4)


def test_feature_norm_l2_ignores_the_length_of_features() -> None:
    method, f = bind(FedGMH, {"feature_norm": "l2"}), torch.rand(2, D)
    server = {**method.setup(), "heads": stack()}
    a, b = (method.aggregate(server, [sent(x, [0, 2])], 1)["heads"] for x in (f, 9 * f))
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a) and not torch.equal(a[W][0], server["heads"][W][0])


def test_independent_starts_differ_between_clients_and_heads_and_a_shared_one_does_not() -> None:
    apart, common = bind(FedGMH, {"init": "independent"}), bind(FedGMH)
    heads, equal_heads = apart.setup()["heads"], common.setup()["heads"]
    assert not torch.equal(heads[W][0], heads[W][1]) and torch.equal(equal_heads[W][0], equal_heads[W][1])
    starts = [apart.init_client(clients().data(i))["own"][W] for i in range(5)]
    assert not any(torch.equal(h, w) for h in heads[W] for w in starts)
    a, b = (apart.init_client(clients().data(i))["own"] for i in (0, 1))
    assert not torch.equal(a[W], b[W]) and equal(a, apart.init_client(clients().data(0))["own"])
    assert same(common.init_client(clients().data(0))["own"], common.ctx.w0)


def test_a_client_whose_labels_changed_uses_the_heads_it_has_and_tells_the_server_the_new_ones() -> None:
    method = bind(FedGMH, {"first_psi": "ones"})
    server = {**method.setup(), "heads": stack()}
    state, up = method.end(method.init_client(one_label(1).data(0)), Trained({}), one_label(1).data(0), 0)
    server = method.aggregate(server, [Upload(up.tree, sender=0)], 0)
    now = one_label(2).data(0)
    params, extras = method.begin(state, method.down(server, [0], 1).to(0), now, 1).model
    assert same(head(params), head(method.ctx.w0))  # nothing received fits
    _, up = method.end(state, Trained(params, extras), now, 1)
    server = method.aggregate(server, [Upload(up.tree, sender=0)], 1)
    assert server["labels"][0].tolist() == [2]


@pytest.mark.parametrize("cls", [FedGMH, FedGMHMended])
def test_a_label_that_appears_during_a_run_has_its_head_at_once_if_data_are_known_to_change(cls) -> None:
    method = bind(cls, {"first_psi": "ones"} if cls is FedGMH else {})
    method.ctx = replace(method.ctx, changing=True)
    heads = stack() if cls is FedGMH else T.row(stack(), 0)
    server = {**method.setup(), "heads": heads}
    assert not method.opening()  # no labels are sent ahead
    state = method.init_client(one_label(1).data(0))
    got = method.down(server, [0], 1).to(0)
    for now in (None, Moment(server, 0, 1)):
        method.schema("down", now).check(got, "the download")
    params, _ = method.begin(state, got, one_label(2).data(0), 1).model  # label 1 has gone, label 2 is new
    if cls is FedGMH:
        assert same(head(params), T.row(heads, 2))
    else:
        assert all(torch.equal(params[k][2], (state["own"][k][2] + heads[k][2]) / 2) for k in (W, B))
        assert all(torch.equal(params[k][:2], state["own"][k][:2]) for k in (W, B))


def test_a_run_with_a_timeline_says_that_data_change() -> None:
    for timeline in (None, "swap_labels(2)"):
        run = settings(method="fedgmh", clients=4, rounds=3, timeline=timeline)
        assert prepare(run).method.opening() == (timeline is None)


# ---- who did not answer, and who answers wrongly ---------------------------------------------------------------------
def test_who_missed_round_0_trains_alone_until_its_labels_are_known(tmp_path: Path) -> None:
    method, data = bind(FedGMH), clients().data(0)
    server, state = method.setup(), method.init_client(data)
    for t in (1, 2):  # nobody answered round 0
        sent = method.down(server, [0], t).to(0)
        method.schema("down", Moment(server, 0, t)).check(sent, "the download")
        params, extras = method.begin(state, sent, data, t).model
        state, up = method.end(state, Trained({**params, W: params[W] + 0.1}, extras), data, t)
        method.schema("up", Moment(server, 0, t)).check(up.tree, "the upload")
        server = method.aggregate(server, [Upload(up.tree, sender=0)], t)
        assert bool(sent) == (t == 2) and list(server["labels"]) == [0]


def test_a_wrong_upload_is_refused() -> None:
    method = bind(FedGMH, weighting="samples")
    good = {
        "x:means": torch.rand(2, D), "x:labels": torch.tensor([0, 2], dtype=torch.int32),
        "x:counts": torch.tensor([4, 5], dtype=torch.int32),
    }  # fmt: skip

    def ids(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    refuses(
        method.schema("up", Moment(method.setup(), 0, 1)),
        good,
        ({"x:labels": ids(0, 99)}, "99 in x:labels, outside 0 to 2"),
        ({"x:labels": ids(-1, 2)}, "-1 in x:labels"),
        ({"x:labels": ids(2, 2)}, "the same value twice in x:labels"),
        ({"x:labels": ids(0, 1, 2)}, "of shape"),
        ({"x:labels": ids(0)}, "of shape"),
        ({"x:means": torch.rand(4, D), "x:labels": ids(0, 1, 2, 0), "x:counts": ids(1, 1, 1, 1)}, "of shape"),
        ({"x:counts": ids(-4, 5)}, "-4 in x:counts"),
        ({"x:counts": ids(0, 5)}, "0 in x:counts, outside 1"),
        ({"x:means": torch.full((2, D), 1e7)}, "1e\\+07 in x:means, outside"),
    )
    refuses(
        method.schema("up", Moment(method.setup(), 0, 0)), {"x:labels": ids(0, 2)}, ({"x:labels": ids(3)}, "outside")
    )


# ---- readings --------------------------------------------------------------------------------------------------------
def random_head(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return Heads(torch.randn(S, D, generator=rng), torch.randn(S, generator=rng))


def masked_step(head, z, y, held, weight, lr):
    stack = Heads(*(t[None] for t in head))
    return Heads(*(t[0] for t in head_step(stack, z[None], y[None], weight[None], lr, held=held[None])))


def test_mended_the_step_is_the_gradient_of_a_softmax_over_the_senders_labels() -> None:
    before = random_head()
    labels = [torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)]
    z, y = torch.randn(5, D, generator=torch.Generator().manual_seed(1)), torch.cat(labels).long()
    held = held_labels(labels, S)
    assert held.tolist() == [[True, False, True]] * 2 + [[True] * 3] * 3
    leaves = [t.clone().requires_grad_() for t in before]
    each = []
    for v, label, own in zip(z, y, held, strict=True):
        logits = (leaves[0] @ v + leaves[1])[own]
        each.append(-logits.log_softmax(0)[int(own[:label].sum())])
    slope = torch.autograd.grad(torch.stack(each).mean(), leaves)
    after = masked_step(before, z, y, held, torch.ones(5), lr=0.3)
    for new, old, g in zip(after, before, slope, strict=True):
        assert torch.allclose(new, old - 0.3 * g, atol=1e-6)


def test_mended_labels_that_a_sender_lacks_get_no_gradient() -> None:
    before, labels = random_head(), torch.tensor([0, 2])
    z = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    after = masked_step(before, z, labels, held_labels([labels], S), torch.ones(2), lr=1.0)
    assert torch.equal(after.weight[1], before.weight[1]) and torch.equal(after.bias[1], before.bias[1])
    assert not torch.equal(after.weight[0], before.weight[0]) and not torch.equal(after.weight[2], before.weight[2])
    alone = masked_step(before, z[:1], labels[:1], held_labels([labels[:1]], S), torch.ones(1), lr=1.0)
    assert torch.equal(alone.weight, before.weight)  # one label has no negatives


def test_mended_only_the_rows_of_a_clients_labels_travel_and_are_written() -> None:
    data = Toy([(torch.randn(8, 4, generator=torch.Generator().manual_seed(5)), torch.tensor([0, 2] * 4))], S)
    method = bind(FedGMHMended, data=data)
    client = data.data(0)
    state, up = method.end(method.init_client(client), Trained({}), client, 0)
    server = method.aggregate(method.setup(), [Upload(up.tree, sender=0)], 0)
    server = {**server, "heads": T.row(stack(1), 0)}
    got = method.down(server, [0], 1).to(0)
    assert sum(v.numel() for v in got.values()) == 2 * (D + 1)  # |S| (d + 1), not |S| L (d + 1)
    method.schema("down", Moment(server, 0, 1)).check(got, "the download")
    method.schema("down").check(got, "the download, in general")
    params, _ = method.begin(state, got, client, 1).model
    for k in (W, B):
        half = (state["own"][k] + server["heads"][k]) / 2
        assert torch.equal(params[k][[0, 2]], half[[0, 2]]) and torch.equal(params[k][1], state["own"][k][1])


def test_mended_the_server_learns_what_the_vectors_say(tmp_path: Path) -> None:
    loop = play(FedGMHMended, tmp_path, rounds=3)
    assert loop.server["heads"][W].shape == (S, D)
    assert not torch.equal(loop.server["heads"][W], loop.method.ctx.w0[W])


def test_code_scores_the_head_right_after_it_was_written() -> None:
    data = clients().data(0)
    method = bind(FedGMH, {"reading": "code"})
    state, up = method.end(method.init_client(data), Trained({}), data, 0)
    server = {**method.aggregate(method.setup(), [Upload(up.tree, sender=0)], 0), "heads": stack(2)}
    got = method.down(server, [0], 1).to(0)
    scored, _ = method.personal(state, got, data)
    trained, _ = method.begin(state, got, data, 1).model
    assert same(head(scored), head(trained)) and not same(head(scored), head(state["own"]))
    assert same(bind(FedGMH).personal(state, got, data)[0], state["own"])


def test_code_critical_entries_stay_local_and_the_others_are_received() -> None:
    data = clients().data(0)
    found = {}
    for reading in ("paper", "code"):
        method = bind(FedGMH, {"reading": reading})
        state, up = method.end(method.init_client(data), Trained({}), data, 0)
        server = {**method.aggregate(method.setup(), [Upload(up.tree, sender=0)], 0), "heads": stack(2)}
        mask = {W: torch.zeros(S, D) > 0, B: torch.ones(S) > 0}  # the bias is critical
        got = method.down(server, [0], 1).to(0)
        params, _ = method.begin({**state, "mask": mask}, got, data, 1).model
        found[reading] = {k: torch.equal(params[k], state["own"][k]) for k in (W, B)}
    assert found == {"paper": {W: True, B: False}, "code": {W: False, B: True}}


def test_code_averages_are_replacements() -> None:
    data = clients().data(0)
    for share, reading in ((0.5, "paper"), (1.0, "code")):
        method = bind(FedGMHoa, {"reading": reading})
        state, server = method.init_client(data), {**method.setup(), "heads": stack(3, heads=1)}
        params, _ = method.begin(state, method.down(server, [0], 1).to(0), data, 1).model
        assert torch.allclose(params[W], (1 - share) * state["own"][W] + share * server["heads"][W][0])


def test_code_masks_by_change_squared_times_value_with_a_floor() -> None:
    before = {"w": torch.zeros(6)}
    after = {"w": torch.tensor([0.3, -0.9, 0.1, 0.2, 0.0, 0.01])}
    assert square_mask(before, after, 0.34)["w"].tolist() == [True, False, False, True, False, False]
    everything_positive = [True, False, True, True, False, True]
    for beta in (0.9, 1.0):  # the threshold is 0 or less, so all positive values count
        assert square_mask(before, after, beta)["w"].tolist() == everything_positive
    still = square_mask(after, after, 0.5)["w"]
    assert not still.any() and math.isfinite(float(still.sum()))
