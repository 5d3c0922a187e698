"""Tests of FedGH."""

from pathlib import Path

import torch
import torch.nn.functional as F

from coterie.methods.fedgh import FedGH
from support.head_methods import bound, class_means, play, round_of, same


def test_fedgh_with_server_rate_0_keeps_the_first_head(tmp_path: Path) -> None:
    loop = play(FedGH, tmp_path, server_lr=0.0)
    assert same(loop.server["w"], {k: loop.method.ctx.w0[k] for k in loop.method.ctx.group("head")})
    assert not same(play(FedGH, tmp_path).server["w"], loop.server["w"])


def test_fedgh_one_small_step_lowers_the_loss_of_the_pairs_in_any_order_of_clients() -> None:
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


def test_fedgh_server_head_shares_no_memory_with_a_client(tmp_path: Path) -> None:
    loop = play(FedGH, tmp_path, {"join": 1.0})
    held = {v.data_ptr() for i in loop.method.ctx.clients for v in loop.runtime.states.get(i)["own"].values()}
    held |= {v.data_ptr() for v in loop.method.ctx.w0.values()}
    assert not held & {v.data_ptr() for v in loop.server["w"].values()}
    assert not loop.method.ctx.group("head") & loop.runtime.states.get(0)["own"].keys()
