"""Tests of FedProto."""

from pathlib import Path

import pytest
import torch

from coterie.methods.fedproto import FedProto
from coterie.methods.local import Local
from support.head_methods import D, K, batch_of, bound, class_means, gradients, opened, play, round_of, same, value


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


def test_fedproto_does_not_depend_on_the_order_of_clients_and_follows_the_weighting() -> None:
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
    _, extras = method.begin(method.init_client(clients[0]), {"x:prototypes": C}, clients[0], 2).model
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
