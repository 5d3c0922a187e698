"""Tests of the gradient of a loss by a tree."""

import torch
import torch.nn.functional as F

from coterie.core import tree as T
from coterie.core.method import Batch
from coterie.methods.pfedme import PFedMe
from coterie.parts.gradient import grad
from support.toy import bind, clients, mlp


def test_grad_is_autograd_and_does_not_touch_its_tree():
    method = bind(PFedMe, model=mlp(True))
    params, batch = T.clone(method.ctx.w0), Batch(*clients().parts[0])
    with method.ctx.net.train_mode(), torch.no_grad():
        got = grad(lambda p: method.loss(p, batch, {}), params, ["0.weight", "3.bias"])
    assert list(got) == ["0.weight", "3.bias"] and not any(v.requires_grad for v in params.values())
    assert torch.equal(params["1.running_mean"], method.ctx.w0["1.running_mean"])  # its norm is not being trained
    leaves = {k: v.clone().requires_grad_(k in got) for k, v in params.items()}
    F.cross_entropy(method.ctx.forward(leaves, batch.x), batch.y).backward()
    assert all(torch.allclose(g, leaves[k].grad) for k, g in got.items())
