"""Tests of LG-FedAvg."""

from coterie.core import tree as T
from support.short_runs import CLIENTS, HEAD, play, same, session, size, state, traffic, watch


def test_lgfedavg_with_all_layers_global_is_uniform_fedavg() -> None:
    assert same(play("lg-fedavg", own={"layers": 3}).server["w"], play("fedavg", weighting="uniform").server["w"])


def test_lgfedavg_with_no_layer_global_is_local() -> None:
    lg, local = play("lg-fedavg", own={"layers": 0}), play("local")
    assert all(same(state(lg, i)["own"], state(local, i)["own"]) for i in CLIENTS if state(local, i))
    assert traffic(lg, "up") == traffic(lg, "down") == [0] * 3


def test_lgfedavg_shares_the_head_not_the_first_layer() -> None:
    loop = play("lg-fedavg")
    assert loop.server["w"].keys() == HEAD
    head = size(loop.method.ctx.w0, HEAD)
    assert traffic(loop, "up") == traffic(loop, "down") == [head] * 3


def test_lgfedavg_after_warm_rounds_starts_each_client_once_from_the_warm_model() -> None:
    s = session("lg-fedavg", own={"warm_rounds": 2}, rounds=4, join=1.0)
    method, data = s.method, s.federation.data(0)
    warm, _ = watch(session("fedavg", rounds=2, join=1.0, weighting="uniform"))
    server = {"w": warm.server["w"], "answered": []}
    first, _ = method.begin(method.init_client(data), method.down(server, [0], 3).to(0), data, 3).model
    assert same(first, warm.server["w"])
    loop, _ = watch(s)
    whole, head = size(method.ctx.w0), size(method.ctx.w0, HEAD)
    assert traffic(loop, "up") == [whole, whole, head, head]
    assert traffic(loop, "down") == [whole, whole, whole, head]
    assert same(T.drop(loop.server["w"], HEAD.__contains__), T.drop(warm.server["w"], HEAD.__contains__))
    body = T.keep(state(loop, 0)["own"], lambda k: k == "fc1.weight")
    assert not same(body, T.keep(warm.server["w"], lambda k: k == "fc1.weight"))
    assert method.global_model(loop.server) is None and method.global_model(server) is not None
