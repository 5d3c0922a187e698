"""Tests of Ditto."""

import pytest

from coterie.core import tree as T
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from support.toy import NORMS, OPTIMISERS, begin, clients, gradient, mlp, models, near, open_toy, play, same


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("run", OPTIMISERS)
def test_ditto_without_a_pull_is_local_training_and_fedavg(run, norm, tmp_path):
    """Each model has its own optimiser state, and the upload does not depend on v."""
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
    """Two steps on v with lam = 2; the anchor is w_t, not the trained copy and not the initial v."""
    data = clients(1)
    loop = begin(open_toy(Ditto, tmp_path, {"lam": 2.0}, data=data, epochs=2, batch=100))
    ctx, (x, y) = loop.method.ctx, data.parts[0]
    v = {k: p + 0.1 for k, p in ctx.w0.items()}
    loop.runtime.states.put(0, {"v": v}, 0)
    loop.step()
    for _ in range(2):
        g = gradient(ctx, v, x, y)
        v = {k: v[k] - 0.1 * (g[k] + 2.0 * (v[k] - ctx.w0[k])) for k in v}
    assert near(loop.runtime.states.get(0)["v"], v)


def test_ditto_with_a_large_lambda_stays_at_the_received_model(tmp_path):
    loop = begin(open_toy(Ditto, tmp_path, {"lam": 1000.0}, lr=0.0005, epochs=30))
    received = [T.clone(loop.server["w"])]
    for _ in (1, 2):
        loop.step()
        received.append(T.clone(loop.server["w"]))
    assert all(near(loop.runtime.states.get(i)["v"], received[1], atol=2e-3) for i in range(5))
