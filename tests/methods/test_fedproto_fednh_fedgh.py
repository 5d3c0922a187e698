"""FedProto, FedNH, FedGH: prototypes instead of weights."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coterie.core.method import Upload
from coterie.methods.fedgh import FedGH
from coterie.methods.fednh import COUNTS, FedNH, move_rows, spread_rows
from coterie.methods.fedproto import FedProto
from coterie.methods.local import Local
from coterie.train.optimisers import Optimiser
from support.head_methods import batch_of, bound, declared, gradients, opened, play, round_of, same, scalars, value

D, K = 16, 10  # of the battery's model


def class_means(method, params, data):
    z = method.ctx.features(params, data.train.x)
    return {k: z[data.train.y == k].mean(0) for k in data.train.y.unique().tolist()}


# ---- FedProto --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("lam", "rounds"), [(0.0, 3), (1.0, 1)], ids=["lambda_0", "first_round"])
def test_fedproto_without_a_pull_is_local_only(tmp_path: Path, lam: float, rounds: int) -> None:
    run = {"rounds": rounds, "join": 1.0}
    ours, local = play(FedProto, tmp_path, run, lam=lam), play(Local, tmp_path, run)
    for i in local.method.ctx.clients:
        assert same(ours.runtime.states.get(i)["own"], local.runtime.states.get(i)["own"])


def test_fedproto_with_a_pull_is_not_local_only(tmp_path: Path) -> None:
    run = {"rounds": 2, "join": 1.0}
    ours, local = play(FedProto, tmp_path, run), play(Local, tmp_path, run)
    assert not same(ours.runtime.states.get(0)["own"], local.runtime.states.get(0)["own"])


def test_fedproto_of_one_client_are_its_class_means() -> None:
    method, clients = bound(FedProto)
    params, _, upload = round_of(method, clients[0])
    C = method.aggregate(method.setup(), [upload], 1)["prototypes"]
    means = class_means(method, params, clients[0])
    assert len(means) < K
    for k in range(K):
        if k in means:
            assert torch.allclose(C[k], means[k], atol=1e-5)
        else:
            assert C[k].isnan().all()


def test_fedproto_does_not_depend_on_the_order_of_clients_and_weighs_as_told() -> None:
    for weighting in ("uniform", "samples"):
        method, clients = bound(FedProto, {"weighting": weighting})
        uploads = [round_of(method, data)[2] for data in clients]
        ahead, back = (method.aggregate(method.setup(), u, 1)["prototypes"] for u in (uploads, uploads[::-1]))
        assert torch.allclose(ahead, back, atol=1e-6, equal_nan=True)
        for k in range(K):
            rows = [u.tree["x:means"][u.tree["x:labels"] == k] for u in uploads]
            counts = torch.tensor([float((data.train.y == k).sum()) for data in clients])
            w = counts if weighting == "samples" else (counts > 0).float()
            mean = sum(w[i] * r[0] for i, r in enumerate(rows) if len(r)) / w.sum()
            assert torch.allclose(ahead[k], mean, atol=1e-5)


def test_fedproto_pull_is_the_mean_square_over_samples_whose_class_has_a_prototype() -> None:
    method, clients = bound(FedProto, lam=2.0)
    params, extras = opened(method, clients[0])
    batch = batch_of(clients[0])
    known = batch.y.unique()[:1]
    C = torch.full((K, D), torch.nan)
    C[known] = 0.5
    _, extras = method.begin(method.init_client(clients[0]), {"x:prototypes": C}, clients[0], 2)
    z = method.ctx.features(params, batch.x)
    expected = 2.0 * ((z - 0.5).square().mean(1) * (batch.y == known)).mean()
    assert expected > 0
    assert torch.allclose(value(method, params, batch, extras) - method.ctx.ce(params, batch), expected, atol=1e-6)
    plain, pulled = bound(FedProto, lam=0.0)[0], gradients(method, params, batch, extras)
    g = gradients(plain, params, batch, extras)
    assert not torch.equal(g["fc2.weight"], pulled["fc2.weight"])
    assert torch.equal(g["classifier.weight"], pulled["classifier.weight"])


def test_fedproto_class_absent_in_a_round_keeps_its_prototype_and_no_weight_travels() -> None:
    method, clients = bound(FedProto)
    upload = round_of(method, clients[0])[2]
    server = {"prototypes": torch.randn(K, D)}
    new = method.aggregate(server, [upload], 2)["prototypes"]
    absent = torch.tensor([k for k in range(K) if k not in upload.tree["x:labels"].tolist()])
    assert torch.equal(new[absent], server["prototypes"][absent]) and not torch.equal(new, server["prototypes"])
    assert all(name.startswith("x:") for name in [*upload.tree, *method.down(server, [0], 1).shared])


def test_fedproto_nearest_prototype_decides_among_the_clients_own_classes() -> None:
    method, clients = bound(FedProto, decide="nearest")
    data = clients[0]
    C = torch.randn(K, D, generator=torch.Generator().manual_seed(0))
    params, extras = method.personal(method.init_client(data), {"x:prototypes": C}, data)
    guess = method.predict(params, data.train.x, extras).argmax(1)
    own = data.train.y.unique()
    assert set(guess.tolist()) <= set(own.tolist())
    z = method.ctx.features(params, data.train.x)
    assert torch.equal(guess, own[torch.cdist(z, C[own]).argmin(1)])


# ---- FedNH -----------------------------------------------------------------------------------------------------------
def test_fednh_prototypes_start_orthonormal_or_well_spread() -> None:
    method, _ = bound(FedNH)
    P = method.setup()["w"]["classifier.weight"]
    assert torch.allclose(P @ P.T, torch.eye(K), atol=1e-6)
    Q = spread_rows(20, 8, torch.Generator().manual_seed(0))
    rough = F.normalize(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    worst = [(R @ R.T - 2 * torch.eye(20)).max() for R in (Q, rough)]
    assert torch.allclose(Q.norm(dim=1), torch.ones(20), atol=1e-6) and worst[0] < worst[1] - 0.2


@pytest.mark.parametrize("rho", [1.0, 0.9, 0.0])
def test_fednh_rows_have_norm_one_and_stand_still_with_full_inertia(tmp_path: Path, rho: float) -> None:
    loop = play(FedNH, tmp_path, {"rounds": 2}, rho=rho)
    P, P0 = (s["w"]["classifier.weight"] for s in (loop.server, loop.method.setup()))
    assert torch.allclose(P.norm(dim=1), torch.ones(K), atol=1e-6)
    assert torch.equal(P, P0) is (rho == 1)


def test_fednh_prototypes_move_on_the_sphere_by_counts_and_absent_classes_do_not_move() -> None:
    P = torch.eye(3)
    directions = torch.zeros(2, 3, 3)
    directions[0, 0], directions[1, 0] = torch.tensor([0.0, 1, 0]), torch.tensor([0.0, 0, 1])
    counts = torch.tensor([[3, 0, 0], [1, 0, 0]])
    new = move_rows(P, directions, counts, 0.9)
    mean = F.normalize(torch.tensor([0.0, 3, 1]), dim=0)
    assert torch.allclose(new[0], F.normalize(0.9 * P[0] + 0.1 * mean, dim=0))
    assert torch.equal(new[1:], P[1:])


def test_fednh_of_one_client_smooths_its_own_prototypes() -> None:
    method, clients = bound(FedNH)
    params, _, upload = round_of(method, clients[0])
    server = method.setup()
    z = F.normalize(method.ctx.features(params, clients[0].train.x), dim=1)
    P, new = server["w"]["classifier.weight"], method.aggregate(server, [upload], 1)["w"]["classifier.weight"]
    for k in range(K):
        own = z[clients[0].train.y == k]
        expected = F.normalize(0.9 * P[k] + 0.1 * F.normalize(own.mean(0), dim=0), dim=0) if len(own) else P[k]
        assert torch.allclose(new[k], expected, atol=1e-5)


def test_fednh_prototypes_are_frozen_under_adam_and_the_mean_of_bodies_is_uniform() -> None:
    method, clients = bound(FedNH)
    uploads = []
    for data in clients[:2]:
        params, _, upload = round_of(method, data, Optimiser("adam", weight_decay=0.1))
        assert torch.equal(params["classifier.weight"], method.setup()["w"]["classifier.weight"])
        assert not params["classifier.bias"].any()
        uploads.append(upload)
    assert uploads[0].samples != uploads[1].samples
    w = method.aggregate(method.setup(), uploads, 1)["w"]
    assert torch.allclose(w["fc1.weight"], (uploads[0].tree["fc1.weight"] + uploads[1].tree["fc1.weight"]) / 2)


def test_fednh_personal_model_is_the_one_after_training_with_the_prototypes_received() -> None:
    method, clients = bound(FedNH)
    params, extras, _ = round_of(method, clients[0])
    state, _ = method.end(method.init_client(clients[0]), params, extras, clients[0], 1)
    server = {"w": {k: v + 1 for k, v in method.setup()["w"].items()}}
    download = method.down(server, [0], 2).to(0)
    assert same(method.personal(state, download, clients[0])[0], params)
    fresh = method.personal(method.init_client(clients[0]), download, clients[0])[0]
    assert same(fresh, method.global_model(server))


def test_fednh_learned_scale_moves_and_is_averaged(tmp_path: Path) -> None:
    loop = play(FedNH, tmp_path, {"rounds": 2}, learn_scale=True)
    assert loop.server["w"]["x:scale"] != 30
    fixed = play(FedNH, tmp_path, {"rounds": 1}).method
    assert declared(loop.method, 3) == tuple(size + 4 for size in declared(fixed, 3))


# ---- FedGH -----------------------------------------------------------------------------------------------------------
def test_fedgh_with_server_rate_0_keeps_the_first_head(tmp_path: Path) -> None:
    loop = play(FedGH, tmp_path, server_lr=0.0)
    assert same(loop.server["w"], {k: loop.method.ctx.w0[k] for k in loop.method.ctx.group("head")})
    assert not same(play(FedGH, tmp_path).server["w"], loop.server["w"])


def test_fedgh_one_small_step_lowers_the_loss_of_the_pairs_whatever_the_order_of_clients() -> None:
    method, clients = bound(FedGH, server_batch=0, server_lr=1e-2)
    uploads = [round_of(method, data)[2] for data in clients]
    z = torch.cat([u.tree["x:means"] for u in uploads])
    y = torch.cat([u.tree["x:labels"] for u in uploads]).long()
    server = method.setup()
    new = method.aggregate(server, uploads, 1)["w"]
    before, after = (F.cross_entropy(method.ctx.logits(h, z), y) for h in (server["w"], new))
    assert after < before
    weight = server["w"]["classifier.weight"].clone().requires_grad_()
    F.cross_entropy(F.linear(z, weight, server["w"]["classifier.bias"]), y).backward()
    assert torch.allclose(new["classifier.weight"], weight.detach() - 1e-2 * weight.grad, atol=1e-6)
    back = method.aggregate(server, uploads[::-1], 1)["w"]
    assert all(torch.allclose(v, back[k], atol=1e-6) for k, v in new.items())


def test_fedgh_sends_class_means_over_samples_and_no_body() -> None:
    method, clients = bound(FedGH)
    params, _, upload = round_of(method, clients[0])
    assert upload.tree.keys() == {"x:means", "x:labels"}
    means = class_means(method, params, clients[0])
    for k, row in zip(upload.tree["x:labels"].tolist(), upload.tree["x:means"], strict=True):
        assert torch.allclose(row, means[k], atol=1e-5)


def test_fedgh_server_head_is_nobody_elses_tensor(tmp_path: Path) -> None:
    loop = play(FedGH, tmp_path, {"join": 1.0})
    held = {v.data_ptr() for i in loop.method.ctx.clients for v in loop.runtime.states.get(i)["own"].values()}
    held |= {v.data_ptr() for v in loop.method.ctx.w0.values()}
    assert not held & {v.data_ptr() for v in loop.server["w"].values()}
    assert not loop.method.ctx.group("head") & loop.runtime.states.get(0)["own"].keys()


# ---- ledger ----------------------------------------------------------------------------------------------------------
def test_declared_bytes_of_prototype_methods_by_hand() -> None:
    labels = 4
    for cls, up, down in (
        (FedProto, lambda m: labels * D + labels, lambda m: K * D),
        (FedGH, lambda m: labels * D + labels, lambda m: scalars(m, "head")),
        (FedNH, lambda m: scalars(m, "body") + K * D + K, lambda m: scalars(m, "body") + K * D),
    ):
        method, clients = bound(cls)
        assert declared(method, labels) == (4 * up(method), 4 * down(method)), cls
    assert isinstance(round_of(method, clients[0])[2], Upload) and COUNTS in round_of(method, clients[0])[2].tree
