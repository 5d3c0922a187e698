"""Tests of pFedHN."""

import torch

from coterie.core.method import Upload
from support.short_runs import bound, near, plain, play, size, traffic


def test_pfedhn_makes_one_model_at_first_and_different_ones_later() -> None:
    method = bound("pfedhn", plain())
    first = method.setup()
    models = [method.generated(first.net, i) for i in range(5)]
    assert all(torch.equal(models[0], m) for m in models[1:])
    after = play("pfedhn", plain(), join=1.0).server.net
    assert not torch.allclose(method.generated(after, 0), method.generated(after, 1), atol=1e-5)
    newcomer = {**after, "embedding": after["embedding"].mean(0, keepdim=True).expand(5, -1)}
    assert torch.allclose(method.generated(after, 99), method.generated(newcomer, 0), atol=1e-6)


def test_pfedhn_does_not_move_when_no_client_moved() -> None:
    method = bound("pfedhn")
    server = method.setup()
    sent = method.down(server, [0, 3], 1)
    after = method.aggregate(server, [Upload(sent.to(i), {}, i, 10) for i in (0, 3)], 1)
    assert near(after.net, server.net)


def test_pfedhn_hyper_network_never_travels() -> None:
    loop = play("pfedhn")
    assert traffic(loop, "up") == traffic(loop, "down") == [size(loop.method.ctx.w0)] * 3
