"""Tests of FedNH."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coterie.core.method import Trained
from coterie.methods.fednh import FedNH, move_rows, spread_rows
from coterie.train.optimisers import Optimiser
from support.head_methods import K, bound, declared, play, round_of, same


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
    state, _ = method.end(method.init_client(clients[0]), Trained(params, extras), clients[0], 1)
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
