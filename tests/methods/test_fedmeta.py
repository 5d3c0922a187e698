"""Tests of FedMeta."""

import pytest
import torch

from coterie.core import tree as T
from coterie.core.context import Split
from coterie.core.method import Batch
from coterie.methods.fedmeta import support_and_query
from coterie.parts.gradient import grad
from support.short_runs import jittered, near, plain, play, same, session, size, traffic

ONE = {"meta_steps": 1}


@pytest.mark.parametrize(
    ("n", "share", "support"), [(10, 0.2, [2, 7]), (5, 0.5, [0, 2, 4]), (3, 0.1, [0]), (1, 0.2, [0])]
)
def test_support_samples_are_evenly_spaced_and_no_set_is_empty(n: int, share: float, support: list[int]) -> None:
    first, second = support_and_query(Split(torch.arange(n), torch.arange(n)), share)
    assert first.x.tolist() == support
    assert second.x.tolist() == ([i for i in range(n) if i not in support] or [0])


def test_without_an_inner_step_it_is_a_step_on_the_query_set() -> None:
    s = session("fedmeta", plain(), own={"alpha": 0, "beta": 0.3, **ONE})
    method, data = s.method, s.federation.data(0)
    start = method.begin({}, method.setup()["w"], data, 1)
    query = support_and_query(data.train, 0.2)[1]
    g = grad(lambda p: method.ctx.loss(p, query), method.ctx.w0, list(method.ctx.w0))
    moved = method.outer(start.params, query, start.extras, torch.Generator())
    assert near(moved, T.add(method.ctx.w0, g, -0.3), 1e-6)


def test_the_outer_gradient_goes_through_the_inner_step() -> None:
    """Compare it with differences of the query loss after the inner step, along a random direction."""
    s = session("fedmeta", plain(), own={"alpha": 0.5, "beta": 1.0, **ONE})
    method, data = s.method, s.federation.data(0)
    w = {k: v.double() for k, v in method.ctx.w0.items()}
    support, query = (b._replace(x=b.x.double()) for b in support_and_query(data.train, 0.2))
    way = {k: v.double() for k, v in jittered(T.scaled(method.ctx.w0, 0.0), 1, 1.0).items()}

    def after(step: float) -> float:
        at = T.add(w, way, step)
        g = grad(lambda p: method.ctx.loss(p, support), at, list(at))
        return float(method.ctx.loss(T.add(at, g, -0.5), query))

    extras = {"support": support, "query": query, "beta": 1.0}
    slope = T.sub(w, method.outer(w, query, extras, torch.Generator()))
    expected = (after(1e-5) - after(-1e-5)) / 2e-5
    assert float(T.dot(slope, way)) == pytest.approx(expected, rel=1e-5)
    first_order = grad(
        lambda p: method.ctx.loss(p, query),
        T.add(w, grad(lambda p: method.ctx.loss(p, support), w, list(w)), -0.5),
        list(w),
    )
    assert float(T.dot(first_order, way)) != pytest.approx(expected, rel=1e-3)


def test_meta_sgd_learns_a_rate_for_every_parameter_and_sends_it() -> None:
    loop = play("fedmeta", plain(), own={"learner": "meta-sgd", "alpha": 0.05})
    rates = T.tagged("rate", loop.server["w"])
    assert rates.keys() == set(loop.method.ctx.net.trainable)
    assert all((v != 0.05).any() for v in rates.values())
    whole = loop.method.global_model(loop.server)
    assert whole is not None and whole.keys() == loop.method.ctx.w0.keys()
    assert traffic(loop, "up") == [size(whole) + size(rates)] * 3
    assert same(T.untagged(loop.server["w"]), whole)


def test_a_copy_is_adapted_by_the_learned_rates() -> None:
    s = session("fedmeta", plain(), own={"learner": "meta-sgd", "alpha": 0.05})
    method, data = s.method, s.federation.data(0)
    w, rates = method.ctx.w0, jittered(T.scaled(method.ctx.w0, 0.0), 2, 0.2)
    params, extras = method.personal({}, {**w, **T.tag("rate", rates)}, data)
    batch = Batch(data.train.x[:8], data.train.y[:8])
    g = grad(lambda p: method.ctx.loss(p, batch), w, list(w))
    expected = {k: w[k] - rates[k] * g[k] for k in w}
    assert near(method.inner(params, batch, extras, torch.Generator()), expected, 1e-6)
