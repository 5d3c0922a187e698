"""Local-Only, FedAvg, FedProx, FedPer, FedRep, Ditto held to their papers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.core import tree as T
from coterie.core.method import Batch
from coterie.engine import codec
from coterie.methods.cfl import CFL
from coterie.methods.ditto import Ditto
from coterie.methods.fedamp import FedAMP
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedper import FedPer
from coterie.methods.fedprox import FedProx
from coterie.methods.fedrep import FedRep
from coterie.methods.local import Local
from coterie.train.optimisers import Optimiser
from coterie.train.trainer import train
from support.toy import Toy, W, begin, bind, clients, events, mlp, models, near, open_toy, play, same

NORMS = [False, True]
RULES = [Optimiser(), Optimiser("sgd", 0.9, 0.1), Optimiser("adam", 0.0, 0.1), Optimiser("adamw", 0.0, 0.1)]
RUNS = [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 0.01}]
EIGHT = [Local, FedAvg, FedProx, FedPer, FedRep, Ditto, FedAMP, CFL]


def slope(ctx, tree, x, y):
    leaves = {k: v.clone().requires_grad_(k in ctx.net.trainable) for k, v in tree.items()}
    F.cross_entropy(ctx.forward(leaves, x), y).backward()
    return {k: leaves[k].grad for k in tree}


def line() -> nn.Module:
    """Two inputs, two classes, all weights zero: every probability is 1/2."""
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def pair() -> Toy:
    """One sample (1, 0) of class 0; three samples (0, 2) of class 1."""
    one, three = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]).repeat(3, 1)
    return Toy([(one, torch.tensor([0])), (three, torch.tensor([1, 1, 1]))], 2)


# One step of rate 1 from zero: the gradient of the cross-entropy is (p - onehot) x, with p = (1/2, 1/2).
STEP = [
    {"weight": torch.tensor([[0.5, 0.0], [-0.5, 0.0]]), "bias": torch.tensor([0.5, -0.5])},
    {"weight": torch.tensor([[0.0, -1.0], [0.0, 1.0]]), "bias": torch.tensor([-0.5, 0.5])},
]


# ---- Local-Only ------------------------------------------------------------------------------------------------------
def test_local_sends_nothing_and_goes_on_from_its_own_model(tmp_path):
    loop = play(Local, tmp_path, rounds=3)
    assert loop.bytes.get("device-cloud", {}) in ({}, {"down": {}, "up": {}})
    data, ctx = clients(), loop.method.ctx
    for i in range(5):
        w = ctx.w0
        for t in (1, 2, 3):
            w, _, _ = train(ctx, Optimiser(), loop.method.phases(t), w, {}, data.data(i), t)
        assert same(loop.runtime.states.get(i)["own"], w)


@pytest.mark.parametrize("cls", [Local, FedPer, FedRep, Ditto])
def test_a_personal_model_does_not_depend_on_what_is_done_by_other_clients_on_the_same_worker(cls, tmp_path):
    """States do not leak: with one round, a client's own part is a function of its own data."""
    data = clients()
    other = Toy([p if i == 2 else (p[0] * -3, p[1].flip(0)) for i, p in enumerate(data.parts)], 3)
    a, b = (play(cls, tmp_path, data=d, rounds=1, model=mlp(True)) for d in (data, other))
    assert codec.equal(a.runtime.states.get(2), b.runtime.states.get(2)) and not codec.equal(
        a.runtime.states.get(1), b.runtime.states.get(1)
    )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("run", RUNS)
def test_one_client_fedavg_is_local(run, norm, tmp_path):
    data = clients(1)
    a, b = (play(cls, tmp_path, data=data, model=mlp(norm), **run) for cls in (FedAvg, Local))
    assert same(a.server["w"], b.runtime.states.get(0)["own"])


# ---- FedAvg ----------------------------------------------------------------------------------------------------------
def test_fedavg_by_hand(tmp_path):
    """The mean weighs clients by samples, 1 to 3; or equally if the run says so."""
    for weighting, share in ((None, (0.25, 0.75)), ("uniform", (0.5, 0.5))):
        loop = play(FedAvg, tmp_path, model=line(), data=pair(), rounds=1, lr=1.0, weighting=weighting)
        expected = {k: share[0] * STEP[0][k] + share[1] * STEP[1][k] for k in ("weight", "bias")}
        assert near(loop.server["w"], expected)


def test_fedavg_with_one_full_batch_step_is_gradient_descent_on_the_mean_loss(tmp_path):
    data = clients(sizes=(8,))
    loop = play(FedAvg, tmp_path, data=data, rounds=1, batch=8)
    x, y = (torch.cat(parts) for parts in zip(*data.parts, strict=True))
    ctx = loop.method.ctx
    assert near(loop.server["w"], T.add(ctx.w0, slope(ctx, ctx.w0, x, y), -0.1))


def test_fedavg_of_identical_clients_is_what_each_of_them_sends(tmp_path):
    data = Toy([clients().parts[0]] * 4, 3)
    loop = play(FedAvg, tmp_path, data=data, rounds=1, batch=100, model=mlp(True))
    alone = play(FedAvg, tmp_path, data=Toy(data.parts[:1], 3), rounds=1, batch=100, model=mlp(True))
    assert near(loop.server["w"], alone.server["w"], atol=1e-6)


def test_fedavg_takes_the_mean_of_the_sampled_only(tmp_path):
    loop = begin(open_toy(FedAvg, tmp_path, join=0.4))
    loop.step()
    asked = events(loop)[0]["participants"]
    assert len(asked) == 2
    data = clients()
    alone = play(FedAvg, tmp_path, data=data, join=0.4, rounds=1)
    other = Toy([p if i in asked else (p[0] * 9, p[1]) for i, p in enumerate(data.parts)], 3)
    assert same(alone.server["w"], loop.server["w"])
    assert same(play(FedAvg, tmp_path, data=other, join=0.4, rounds=1).server["w"], loop.server["w"])


def test_the_counter_of_batch_norm_neither_travels_nor_is_averaged():
    method = bind(FedAvg, model=mlp(True))
    assert "1.num_batches_tracked" not in method.ctx.w0 and "1.running_mean" in method.setup()["w"]


# ---- FedProx ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("run", RUNS)
def test_fedprox_with_zero_mu_is_fedavg(run, norm, tmp_path):
    a = play(FedProx, tmp_path, {"mu": 0.0}, model=mlp(norm), join=0.6, **run)
    b = play(FedAvg, tmp_path, model=mlp(norm), join=0.6, **run)
    assert same(a.server["w"], b.server["w"])


def test_fedprox_by_hand(tmp_path):
    """Two full-batch steps on one client; the anchor is the received model throughout, at every batch."""
    data = clients(1)
    loop = play(FedProx, tmp_path, {"mu": 2.0}, data=data, rounds=1, epochs=2, batch=100)
    ctx, (x, y) = loop.method.ctx, data.parts[0]
    one = T.add(ctx.w0, slope(ctx, ctx.w0, x, y), -0.1)
    g = slope(ctx, one, x, y)
    assert near(loop.server["w"], {k: one[k] - 0.1 * (g[k] + 2.0 * (one[k] - ctx.w0[k])) for k in one})


@pytest.mark.parametrize("norm", NORMS)
def test_fedprox_penalty_has_the_gradient_mu_delta_and_spares_statistics(norm):
    method = bind(FedProx, {"mu": 3.0}, model=mlp(norm))
    ctx, (x, y) = method.ctx, clients().parts[0]
    there = {k: v + 0.01 * (i + 1) for i, (k, v) in enumerate(ctx.w0.items())}
    names = sorted(ctx.net.trainable)
    leaves = {k: v.clone().requires_grad_(k in ctx.net.trainable) for k, v in there.items()}
    total = method.loss(leaves, Batch(x, y), {"anchor": ctx.w0})
    got = dict(zip(names, torch.autograd.grad(total, [leaves[k] for k in names]), strict=True))
    plain = slope(ctx, there, x, y)
    assert near(got, {k: plain[k] + 3.0 * (there[k] - ctx.w0[k]) for k in names}, atol=1e-5)
    if norm:
        other = {**ctx.w0, "1.running_mean": ctx.w0["1.running_mean"] + 7}
        assert torch.equal(total, method.loss(leaves, Batch(x, y), {"anchor": other}))


def test_fedprox_with_a_very_large_mu_stays_at_the_received_model(tmp_path):
    start = mlp().state_dict()
    ends = [play(FedProx, tmp_path, {"mu": mu}, rounds=1, epochs=5, lr=1e-4).server["w"] for mu in (0.0, 9000.0)]
    moved = [T.sqdist(w, start, w) for w in ends]
    assert moved[1] < 0.05 * moved[0]


# ---- FedPer ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("layers", "twin"), [(0, FedAvg), (2, Local)])
def test_fedper_with_no_personal_layer_is_fedavg_and_with_all_is_local(layers, twin, norm, tmp_path):
    a = play(FedPer, tmp_path, {"layers": layers}, model=mlp(norm), join=0.6)
    b = play(twin, tmp_path, model=mlp(norm), join=0.6)
    assert same(models(a), models(b))


@pytest.mark.parametrize("cls", [FedPer, FedRep])
def test_split_methods_share_the_body_and_keep_the_head(cls, tmp_path):
    loop = play(cls, tmp_path, model=mlp(True))
    head = loop.method.ctx.group("head")
    assert head == {"3.weight", "3.bias"} and not head & loop.server["w"].keys()
    assert loop.method.global_model(loop.server) is None
    one, two = models(loop)[0], models(loop)[1]
    assert {k for k in one if not torch.equal(one[k], two[k])} == head


# ---- FedRep ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
def test_fedrep_freezes_hold_under_every_optimiser(rule):
    """Bit for bit, statistics of batch norm included."""
    data = clients()
    method = bind(FedRep, {"head_epochs": 2, "body_epochs": 2}, model=mlp(True), data=data)
    ctx, head = method.ctx, method.ctx.group("head")
    for phase, moves in zip(method.phases(1), (head, ctx.group("body")), strict=True):
        after, _, _ = train(ctx, rule, [phase], ctx.w0, {}, data.data(0), 1)
        changed = {k for k in after if not torch.equal(after[k], ctx.w0[k])}
        assert changed <= moves and changed & ctx.net.trainable
        assert bool(changed & ctx.group("bn_stats")) == (moves != head)


def test_fedrep_by_hand_head_first_then_body(tmp_path):
    data = clients(1)
    loop = play(FedRep, tmp_path, {"head_epochs": 1, "body_epochs": 1}, data=data, rounds=1, batch=100)
    ctx, (x, y) = loop.method.ctx, data.parts[0]
    head = ctx.group("head")
    g = slope(ctx, ctx.w0, x, y)
    one = {k: v - 0.1 * g[k] if k in head else v for k, v in ctx.w0.items()}
    g = slope(ctx, one, x, y)
    two = {k: v if k in head else v - 0.1 * g[k] for k, v in one.items()}
    assert near(loop.runtime.states.get(0)["own"], T.keep(two, head.__contains__))
    assert near(loop.server["w"], T.drop(two, head.__contains__))


def test_fedrep_without_body_epochs_never_moves_the_body(tmp_path):
    loop = play(FedRep, tmp_path, {"body_epochs": 0}, model=mlp(True), data=clients(4, sizes=(8,)), optimizer="adam")
    w0 = loop.method.ctx.w0
    assert same(loop.server["w"], T.keep(w0, loop.server["w"].__contains__))  # four equal shares are exact
    assert not torch.equal(loop.runtime.states.get(0)["own"]["3.weight"], w0["3.weight"])


# ---- Ditto -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("run", RUNS)
def test_ditto_without_a_pull_is_local_beside_fedavg(run, norm, tmp_path):
    """One optimiser per model: momentum does not cross, and the upload has nothing of v."""
    a = play(Ditto, tmp_path, {"lam": 0.0}, model=mlp(norm), join=0.6, **run)
    b = play(Local, tmp_path, model=mlp(norm), join=0.6, **run)
    c = play(FedAvg, tmp_path, model=mlp(norm), join=0.6, weighting="uniform", **run)
    assert same(models(a), models(b))
    assert same(a.server["w"], c.server["w"])
    assert a.bytes == c.bytes


@pytest.mark.parametrize("lam", [0.5, 8.0])
def test_ditto_global_model_does_not_depend_on_lambda(lam, tmp_path):
    a = play(Ditto, tmp_path, {"lam": lam}, model=mlp(True))
    b = play(FedAvg, tmp_path, model=mlp(True), weighting="uniform")
    assert same(a.server["w"], b.server["w"])


def test_ditto_by_hand_is_anchored_at_the_received_model(tmp_path):
    """Two steps on v with lam 2: the anchor is w_t, not the trained copy and not v's own start."""
    data = clients(1)
    loop = begin(open_toy(Ditto, tmp_path, {"lam": 2.0}, data=data, epochs=2, batch=100))
    ctx, (x, y) = loop.method.ctx, data.parts[0]
    v = {k: p + 0.1 for k, p in ctx.w0.items()}
    loop.runtime.states.put(0, {"v": v}, 0)
    loop.step()
    for _ in range(2):
        g = slope(ctx, v, x, y)
        v = {k: v[k] - 0.1 * (g[k] + 2.0 * (v[k] - ctx.w0[k])) for k in v}
    assert near(loop.runtime.states.get(0)["v"], v)


def test_ditto_with_a_large_lambda_stays_at_the_received_model(tmp_path):
    loop = begin(open_toy(Ditto, tmp_path, {"lam": 1000.0}, lr=0.0005, epochs=30))
    received = [T.clone(loop.server["w"])]
    for _ in (1, 2):
        loop.step()
        received.append(T.clone(loop.server["w"]))
    assert all(near(loop.runtime.states.get(i)["v"], received[1], atol=2e-3) for i in range(5))


# ---- all eight -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cls", EIGHT)
def test_nothing_handed_over_is_shared(cls, tmp_path):
    """Server, clients and the context hold tensors of their own: a later write cannot reach back."""
    loop = play(cls, tmp_path, model=mlp(True))
    owners = {"server": loop.server, "context": {"w0": loop.method.ctx.w0}}
    owners |= {f"client {i}": loop.runtime.states.get(i) or {} for i in range(5)}
    seen: dict[int, str] = {}
    for owner, value in owners.items():
        for t in codec.tensors_of(value):
            assert seen.setdefault(t.untyped_storage().data_ptr(), owner) == owner


@pytest.mark.parametrize(
    ("cls", "up", "down"),
    [
        (Local, 0, 0),
        *((cls, W, W) for cls in (FedAvg, FedProx, Ditto, FedAMP, CFL)),
        *((cls, W - 21, W - 21) for cls in (FedPer, FedRep)),
    ],
)
def test_bytes_by_hand(cls, up, down, tmp_path):
    for e in events(play(cls, tmp_path, join=0.6)):
        m, book = len(e["participants"]), e["bytes"].get("device-cloud", {})
        assert sum(book.get("up", {}).values()) == 4 * up * m and sum(book.get("down", {}).values()) == 4 * down * m


def test_batch_norm_is_found_by_type_whatever_its_name(tmp_path):
    module = nn.Sequential()
    module.add_module("bn_is_a_linear_layer", nn.Linear(4, 6))
    module.add_module("downsample", nn.Sequential(nn.Identity(), nn.BatchNorm1d(6)))
    module.add_module("out", nn.Linear(6, 3))
    loop = play(FedAvg, tmp_path, model=module, bn_stats="local")
    stats = {"downsample.1.running_mean", "downsample.1.running_var"}
    assert loop.method.ctx.group("bn_stats") == stats
    assert loop.method.ctx.w0.keys() - loop.server["w"].keys() == stats == loop.runtime.states.get(0)["own"].keys()
