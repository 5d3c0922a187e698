"""Tests of FedAMP."""

import math

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Batch
from coterie.errors import CoterieError
from coterie.methods.fedamp import FedAMP
from coterie.methods.fedprox import FedProx
from coterie.methods.local import Local
from coterie.parts import model_bank as bank
from support.toy import NORMS, OPTIMISERS, W, bind, clients, mlp, models, moved, near, play, same, uploads, with_clients


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("run", OPTIMISERS)
def test_fedamp_without_a_pull_is_local(run, norm, tmp_path):
    a = play(FedAMP, tmp_path, {"lam": 0.0}, model=mlp(norm), join=0.6, **run)
    b = play(Local, tmp_path, model=mlp(norm), join=0.6, **run)
    assert same(models(a), models(b))


@pytest.mark.parametrize("variant", ["heuristic", "attention"])
def test_fedamp_alone_is_fedprox_to_its_own_start(variant, tmp_path):
    data = clients(1)
    a = play(FedAMP, tmp_path, {"variant": variant, "lam": 3.0, "alpha": 2.0}, data=data)
    b = play(FedProx, tmp_path, {"mu": 1.5}, data=data)
    assert near(models(a)[0], b.server["w"])


def test_fedamp_heuristic_mixing_by_hand():
    method = bind(FedAMP, {"sigma": 2.0, "self_weight": 0.3})
    V = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 2.0]])
    X = method.mixing(V, torch.tensor([0, 2]))
    a, b = math.exp(2.0 * 0.0), math.exp(2.0 * math.sqrt(0.5))
    assert torch.allclose(X[0], torch.tensor([0.3, 0.7 * a / (a + b), 0.7 * b / (a + b)]))
    assert torch.allclose(X[1], torch.tensor([0.35, 0.35, 0.3]))


def test_fedamp_attention_mixing_by_hand():
    method = bind(FedAMP, {"variant": "attention", "alpha": 0.5, "sigma": 4.0})
    V = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0]])
    near_, far = 0.5 / 4 * math.exp(-1.0), 0.5 / 4 * math.exp(-4.0)
    assert torch.allclose(method.mixing(V, torch.tensor([0]))[0], torch.tensor([1 - near_ - far, near_, far]))


@pytest.mark.parametrize("variant", ["heuristic", "attention"])
def test_fedamp_rows_are_convex_and_identical_clients_mix_to_themselves(variant):
    method = bind(FedAMP, {"variant": variant, "sigma": 5.0})
    rng = torch.Generator().manual_seed(0)
    V = torch.randn(6, 9, generator=rng)
    X = method.mixing(V, torch.arange(6))
    assert torch.allclose(X.sum(1), torch.ones(6)) and (X >= 0).all() and (X <= 1).all()
    same_ = V[:1].expand(6, -1)
    assert torch.allclose(method.mixing(same_, torch.arange(6)) @ same_, same_, atol=1e-6)


def test_fedamp_keeps_the_models_of_distant_clients_and_refuses_a_too_large_alpha():
    method = bind(FedAMP, {"variant": "attention", "sigma": 0.5})
    V = 100 * torch.eye(4)
    assert torch.equal(method.mixing(V, torch.arange(4)), torch.eye(4))
    with pytest.raises(CoterieError, match="alpha / sigma is too large"):
        method.mixing(torch.zeros(4, 3), torch.arange(4))


def test_fedamp_penalty_has_a_gradient():
    method = bind(FedAMP, {"lam": 3.0, "alpha": 2.0})
    batch = Batch(*clients().parts[0])
    leaves = {k: v.clone().requires_grad_() for k, v in method.ctx.w0.items()}
    u = {k: v - 0.2 for k, v in method.ctx.w0.items()}
    whole = torch.autograd.grad(method.phases(1)[0].loss(leaves, batch, {"u": u}), list(leaves.values()))
    plain = torch.autograd.grad(method.ctx.ce(leaves, batch), list(leaves.values()))
    assert all(
        torch.allclose(a - b, torch.full_like(a, 1.5 * 0.2), atol=1e-5) for a, b in zip(whole, plain, strict=True)
    )


def test_fedamp_mixes_the_stored_models_of_the_absent_by_id():
    ids = (12, 3, 40)
    method = with_clients(bind(FedAMP, {"self_weight": 0.25, "sigma": 1e-9}), ids)  # others weigh the same
    one, two = moved(method, torch.tensor([[1.0] * W, [5.0] * W]))
    server = method.aggregate(method.setup(), uploads([one], [40]), 1)
    server = method.aggregate(server, uploads([two], [3]), 2)
    sent = method.down(server, [40, 12, 99], 3)
    offset = T.flatten(sent.to(40)) - T.flatten(method.ctx.w0)
    assert torch.allclose(offset, torch.full((W,), 0.25 * 1 + 0.375 * 5 + 0.375 * 0), atol=1e-5)
    offset = T.flatten(sent.to(12)) - T.flatten(method.ctx.w0)
    assert torch.allclose(offset, torch.full((W,), 0.375 * 1 + 0.375 * 5), atol=1e-5)
    offset = T.flatten(sent.to(99)) - T.flatten(method.ctx.w0)
    assert torch.allclose(offset, torch.full((W,), (1 + 5 + 0) / 3), atol=1e-5)  # a newcomer gets the mean of all
    assert bank.rows(server["bank"], [40]).tolist() == [2]
