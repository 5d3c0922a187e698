"""Tests of q-FFL."""

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Upload
from coterie.methods.qffl import LOSS
from support.short_runs import STATS, bound, jittered, play, same, session, size, traffic, watch


def lossy(sender: int, tree: T.Tree, loss: float) -> Upload:
    return Upload({**tree, LOSS: torch.tensor([loss])}, {}, sender, 10 + sender)


def test_q_ffl_with_zero_q_is_fedavg() -> None:
    fair, avg = play("q-ffl", own={"q": 0}), play("fedavg", weighting="uniform")
    assert same(fair.server["w"], avg.server["w"])
    fair, avg = play("q-ffl", own={"q": 0}, weighting="samples"), play("fedavg")
    assert same(fair.server["w"], avg.server["w"])


def test_q_ffl_takes_the_step_of_the_paper() -> None:
    method = bound("q-ffl", own={"q": 2.0})
    w, lr = method.setup()["w"], method.ctx.lr
    models, losses = [jittered(w, i) for i in (1, 2)], [0.5, 2.0]
    after = method.aggregate({"w": w}, [lossy(i, m, losses[i]) for i, m in enumerate(models)], 1)["w"]
    names = sorted(method.ctx.net.trainable)
    g = [{k: (w[k] - m[k]) / lr for k in names} for m in models]
    squares = [sum(float(v.square().sum()) for v in one.values()) for one in g]
    h = [2 * F * square + F**2 / lr for F, square in zip(losses, squares, strict=True)]
    for k in names:
        step = sum(F**2 * one[k] for F, one in zip(losses, g, strict=True)) / sum(h)
        assert torch.allclose(after[k], w[k] - step, atol=1e-6), k
    assert all(torch.allclose(after[k], (models[0][k] + models[1][k]) / 2) for k in STATS)


def test_q_ffl_sends_the_loss_at_the_model_received() -> None:
    s = session("q-ffl", rounds=1)
    loop, seen = watch(s)
    for u in seen[0]:
        x, y = s.federation.data(u.sender).train
        logits = s.method.ctx.forward(s.method.ctx.w0, x)
        assert float(u.tree[LOSS]) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), abs=1e-5)
    assert traffic(loop, "up") == [size(s.method.ctx.w0) + 4] and traffic(loop, "down") == [size(s.method.ctx.w0)]
